//! The chains that Istio writes into namespaces, whoever wrote them there.

use std::collections::BTreeSet;

use super::run::{Backend, Tools, Variant, run};
use crate::{redirect::Error, sys::netns::Netns};

/// What all of Istio's chains begin with.
const PREFIX: &str = "ISTIO_";

/// Those in `netns`, in nftables and in the tables of before; nothing is said of what no program of the node reads. Blocking.
///
/// # Errors
/// Why no program can be asked.
pub fn istio_chains(netns: &Netns) -> Result<Vec<String>, Error> {
    let mut found = BTreeSet::new();
    let mut failure = None;
    let mut asked = false;
    for backend in [Backend::Nft, Backend::Legacy] {
        let tools = match Tools::find(backend) {
            Ok(tools) => tools,
            Err(error) => {
                failure.get_or_insert(error);
                continue;
            }
        };
        asked = true;
        // Reading tables of before would make them.
        if tools.variant == Variant::Legacy && !has_tables(netns) {
            continue;
        }
        let runs: Vec<_> = tools.families().map(|programs| programs.save()).collect();
        for saved in run(netns, &runs) {
            found.extend(chains(&saved?));
        }
    }
    match failure {
        Some(error) if !asked => Err(error),
        _ => Ok(found.into_iter().collect()),
    }
}

fn has_tables(netns: &Netns) -> bool {
    let names = ["ip_tables_names", "ip6_tables_names"];
    let is_any = || {
        names.iter().any(|name| {
            let path = format!("/proc/thread-self/net/{name}");
            std::fs::read_to_string(path).is_ok_and(|names| !names.trim().is_empty())
        })
    };
    netns.run(is_any).unwrap_or(false)
}

fn chains(saved: &str) -> impl Iterator<Item = String> {
    saved.lines().filter_map(|line| {
        let name = line.strip_prefix(':')?.split(' ').next()?;
        name.starts_with(PREFIX).then(|| name.to_owned())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chains_are_told_by_their_names() {
        let saved = "*nat\n:PREROUTING ACCEPT [0:0]\n:ISTIO_PRERT - [0:0]\n:KUBE_ISTIO_X - [0:0]\n-A PREROUTING -j ISTIO_PRERT\nCOMMIT\n\
                     *mangle\n:ISTIO_OUTPUT - [5:6]\nCOMMIT\n";
        assert_eq!(chains(saved).collect::<Vec<_>>(), ["ISTIO_PRERT", "ISTIO_OUTPUT"]);
    }
}
