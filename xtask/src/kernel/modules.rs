//! The modules that the tests need, in the order in which they can be inserted. Packages bring no `modules.dep`, which depmod
//! writes when a kernel is installed, so the order comes from what each module says of itself.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};

use super::{file_name, files};
use crate::process;

/// Without these there is no pod network, and no hook to attach to.
pub(crate) const REQUIRED: &[&str] = &["bridge", "veth", "sch_ingress", "cls_bpf"];

/// What tests of other ways to redirect want, where the kernel has them: rules of iptables, by its old and its new backend.
pub(crate) const OPTIONAL: &[&str] = &[
    "act_bpf",
    "ip_tables",
    "iptable_nat",
    "iptable_mangle",
    "iptable_raw",
    "ip6_tables",
    "ip6table_nat",
    "ip6table_mangle",
    "ip6table_raw",
    "nf_tables",
    "nft_compat",
    "nft_chain_nat",
    "nft_redir",
    "nft_counter",
    "nft_ct",
    "nf_nat",
    "nf_conntrack",
    "xt_conntrack",
    "xt_connmark",
    "xt_mark",
    "xt_tcpudp",
    "xt_REDIRECT",
    "xt_CT",
    "xt_owner",
    "xt_multiport",
    "ip_set",
    "ip_set_hash_ip",
    "xt_set",
];

/// Puts the modules into `directory`, uncompressed, and returns their file names in the order of insertion.
pub(crate) fn unpack(modules: &Path, directory: &Path) -> Result<Vec<String>> {
    let available: BTreeMap<String, PathBuf> = files(&[modules.to_owned()])
        .into_iter()
        .filter_map(|path| Some((module_name(file_name(&path))?, path)))
        .collect();
    let builtin: BTreeSet<String> = files(&[modules.to_owned()])
        .iter()
        .filter(|path| file_name(path) == "modules.builtin")
        .filter_map(|path| fs::read_to_string(path).ok())
        .flat_map(|text| text.lines().filter_map(module_name).collect::<Vec<_>>())
        .collect();
    let mut depends = |name: &str| {
        if builtin.contains(name) {
            return Ok(None);
        }
        let Some(path) = available.get(name) else {
            bail!("the kernel has no module {name}");
        };
        let bytes = read(path)?;
        let file = format!("{name}.ko");
        fs::write(directory.join(&file), &bytes)
            .with_context(|| format!("writing {file} into {}", directory.display()))?;
        Ok(Some(depends_of(&bytes)))
    };
    let mut order = Vec::new();
    for name in REQUIRED {
        insert(name, &mut depends, &mut order)?;
    }
    for name in OPTIONAL {
        if builtin.contains(*name) || available.contains_key(*name) {
            insert(name, &mut depends, &mut order)?;
        }
    }
    Ok(order.into_iter().map(|name| format!("{name}.ko")).collect())
}

/// Appends a module to `order`, behind all that it depends on. `depends` tells these; `None` for a part of the kernel itself.
fn insert(
    name: &str,
    depends: &mut impl FnMut(&str) -> Result<Option<Vec<String>>>,
    order: &mut Vec<String>,
) -> Result<()> {
    if order.iter().any(|there| there == name) {
        return Ok(());
    }
    let Some(needed) = depends(name)? else {
        return Ok(());
    };
    for needed in needed {
        // The kernel's own build refuses circles, so this ends.
        insert(&needed, depends, order).with_context(|| format!("needed by {name}"))?;
    }
    order.push(name.to_owned());
    Ok(())
}

/// `veth` of `kernel/drivers/net/veth.ko.xz`. Hyphens in file names are underscores in the names that dependencies use.
fn module_name(path: &str) -> Option<String> {
    let file = path.rsplit('/').next()?;
    let (name, compression) = file.split_once(".ko")?;
    ["", ".xz", ".zst", ".gz"]
        .contains(&compression)
        .then(|| name.replace('-', "_"))
}

/// The modules that a module names in its `depends=` line.
fn depends_of(module: &[u8]) -> Vec<String> {
    let key = b"depends=";
    // A text of the section .modinfo: it begins after another's zero byte, or is its first.
    let lines = module.split(|byte| *byte == 0);
    let value = lines
        .filter_map(|line| line.strip_prefix(key))
        .next()
        .unwrap_or_default();
    String::from_utf8_lossy(value)
        .split(',')
        .filter(|name| !name.is_empty())
        .map(|name| name.replace('-', "_"))
        .collect()
}

/// A module's bytes, uncompressed.
fn read(path: &Path) -> Result<Vec<u8>> {
    let program = match path.extension().and_then(|extension| extension.to_str()) {
        Some("xz") => "xz",
        Some("zst") => "zstd",
        Some("gz") => "gzip",
        _ => return fs::read(path).with_context(|| format!("reading {}", path.display())),
    };
    let output = process::command(program).arg("-dc").arg(path).output();
    let output = output.with_context(|| format!("starting {program}"))?;
    if !output.status.success() {
        bail!("{program} cannot unpack {}", path.display());
    }
    Ok(output.stdout)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_needed_comes_first_and_once() {
        let known = BTreeMap::from([
            ("bridge", vec!["stp", "llc"]),
            ("stp", vec!["llc"]),
            ("llc", vec![]),
            ("veth", vec!["libcrc32c"]),
        ]);
        let mut depends = |name: &str| {
            if name == "libcrc32c" {
                return Ok(None);
            }
            let needed = known.get(name).with_context(|| format!("no module {name}"))?;
            Ok(Some(needed.iter().map(|name| (*name).to_owned()).collect()))
        };
        let mut order = Vec::new();
        insert("bridge", &mut depends, &mut order).unwrap();
        insert("veth", &mut depends, &mut order).unwrap();
        insert("llc", &mut depends, &mut order).unwrap();
        assert_eq!(order, ["llc", "stp", "bridge", "veth"]);
        let error = insert("absent", &mut depends, &mut order).unwrap_err();
        assert!(format!("{error:#}").contains("absent"));
    }

    #[test]
    fn modules_tell_their_names_and_needs() {
        assert_eq!(module_name("kernel/net/llc/llc.ko.xz").as_deref(), Some("llc"));
        assert_eq!(
            module_name("kernel/lib/crc-itu-t.ko").as_deref(),
            Some("crc_itu_t")
        );
        assert_eq!(module_name("modules.builtin"), None);
        let module = b"\x7fELF\0license=GPL\0depends=stp,llc\0name=bridge\0";
        assert_eq!(depends_of(module), ["stp", "llc"]);
        assert!(depends_of(b"license=GPL\0depends=\0retpoline=Y\0").is_empty());
    }
}
