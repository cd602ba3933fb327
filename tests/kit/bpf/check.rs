//! What an object uses, against the tables and against a list of what is allowed to be newer.

use std::{collections::BTreeSet, fmt};

use super::{
    Kind, Version, features, fields, helpers,
    object::{Loaded, Map},
    walk::{Site, Use, walk},
};

/// What may be newer than the oldest kernel, since the program is loaded only where a probe has shown that it can be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Probed {
    /// The program.
    pub program: &'static str,
    /// What it uses, as [`Finding::what`] names it.
    pub what: &'static str,
    /// Where the probe is.
    pub probe: &'static str,
}

/// One thing that an object uses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// The program, or the map.
    pub of: String,
    /// At which instruction it was first seen; 0 for what is the whole's.
    pub pc: usize,
    /// What: `bpf_redirect`, `__sk_buff.mark`, `map type lpm_trie`, …
    pub what: String,
    /// When it came, and what brought it.
    pub since: Option<(Version, &'static str)>,
    /// What is wrong with it; never a matter of its version.
    pub fault: Option<String>,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} uses {} (instruction {})", self.of, self.what, self.pc)?;
        if let Some((version, source)) = self.since {
            write!(f, ", there since {version} ({source})")?;
        }
        self.fault.as_ref().map_or(Ok(()), |fault| write!(f, ": {fault}"))
    }
}

/// Everything that an object uses, each once per program.
pub fn findings(object: &Loaded) -> Vec<Finding> {
    let sockets = object.socket_maps();
    let mut all = Vec::new();
    for map in object.maps.values() {
        all.extend(of_map(map));
    }
    for (name, program) in &object.programs {
        let kind = program.kind;
        let whole = |what: String, since| Finding {
            of: name.clone(),
            pc: 0,
            what,
            since: Some(since),
            fault: None,
        };
        all.push(whole(format!("program type {kind:?}"), kind.since()));
        all.push(whole("its attachment".to_owned(), kind.attached_since()));
        match walk(&program.insns, kind.context(), &sockets) {
            Ok(sites) => all.extend(of_program(name, kind, &sites, object)),
            Err(fault) => all.push(Finding {
                of: name.clone(),
                pc: 0,
                what: "something that cannot be followed".to_owned(),
                since: None,
                fault: Some(fault.to_string()),
            }),
        }
    }
    all
}

/// What is wrong with an object: faults, what is newer than `oldest` and not in `probed`, and what of `probed` is not used.
pub fn violations(findings: &[Finding], oldest: Version, probed: &[Probed]) -> Vec<String> {
    let allows =
        |entry: &Probed, finding: &Finding| entry.program == finding.of && entry.what == finding.what;
    let is_new = |finding: &Finding| finding.since.is_some_and(|(since, _)| since > oldest);
    let mut wrong = Vec::new();
    for finding in findings {
        let allowed = || probed.iter().any(|entry| allows(entry, finding));
        if finding.fault.is_some() {
            wrong.push(finding.to_string());
        } else if is_new(finding) && !allowed() {
            wrong.push(format!(
                "{finding}: newer than {oldest}; avoid it, or probe for it and say so in the list of what is probed"
            ));
        }
    }
    for entry in probed {
        if !findings
            .iter()
            .any(|finding| allows(entry, finding) && is_new(finding))
        {
            wrong.push(format!(
                "{} does not use {}, or it is not new: remove it from the list of what is probed",
                entry.program, entry.what
            ));
        }
    }
    wrong
}

fn of_map(map: &Map) -> Vec<Finding> {
    let finding = |what: String, since: Option<(Version, &'static str)>| Finding {
        of: format!("map {}", map.name),
        pc: 0,
        what,
        fault: since.is_none().then(|| NOT_IN_TABLE.to_owned()),
        since,
    };
    let mut all = vec![match features::map_type(map.map_type) {
        Some((name, since, source)) => finding(format!("map type {name}"), Some((since, source))),
        None => finding(format!("map type {}", map.map_type), None),
    }];
    for bit in (0..u32::BITS).filter(|bit| map.flags & (1 << bit) != 0) {
        all.push(match features::map_flag(bit) {
            Some((name, since, source)) => finding(format!("map flag {name}"), Some((since, source))),
            None => finding(format!("map flag {bit}"), None),
        });
    }
    all
}

const NOT_IN_TABLE: &str = "not in the tables; look it up in the kernel's history, and add it to kit/bpf";

/// The findings of a program; sites are in order, so the first of each stands for the others.
fn of_program(name: &str, kind: Kind, sites: &BTreeSet<Site>, object: &Loaded) -> Vec<Finding> {
    let mut all: Vec<Finding> = Vec::new();
    for site in sites {
        let found = match site.used {
            Use::Helper { id, map } => of_helper(kind, id, map.and_then(|fd| object.maps.get(&fd))),
            Use::Access {
                object,
                offset,
                bytes,
                write,
            } => vec![of_access(object, offset, bytes, write)],
            Use::Feature(feature) => vec![(format!("{feature:?}"), Some(feature.since()), None)],
        };
        for (what, since, fault) in found {
            let seen = |other: &Finding| other.what == what && other.fault == fault;
            if !all.iter().any(seen) {
                all.push(Finding {
                    of: name.to_owned(),
                    pc: site.pc,
                    what,
                    since,
                    fault,
                });
            }
        }
    }
    all
}

type Found = (String, Option<(Version, &'static str)>, Option<String>);

fn of_helper(kind: Kind, id: i32, map: Option<&Map>) -> Vec<Found> {
    let Some(helper) = helpers::find(id) else {
        return vec![(format!("helper {id}"), None, Some(NOT_IN_TABLE.to_owned()))];
    };
    let name = format!("bpf_{}", helper.name);
    let since = helper.since(kind);
    let fault = since
        .is_none()
        .then(|| format!("no kernel of the tables has it for {kind:?} programs"));
    let mut found = vec![(name.clone(), since, fault)];
    if let Some((map, since)) = map.and_then(|map| Some((map, helpers::with_map(id, map.map_type)?))) {
        let (map_type, ..) = features::map_type(map.map_type).expect("the table of pairs names known ones");
        found.push((format!("{name} on {map_type}"), Some(since), None));
    }
    found
}

fn of_access(object: fields::Object, offset: i32, bytes: u8, write: bool) -> Found {
    let verb = if write { "written" } else { "read" };
    let Some(field) = fields::find(object, offset) else {
        let what = format!("{} at offset {offset}, {verb}", object.name());
        return (what, None, Some(NOT_IN_TABLE.to_owned()));
    };
    let what = format!("{}.{}", object.name(), field.name);
    let (what, since) = if write {
        (format!("{what}, written"), field.write)
    } else {
        (what, Some(field.read))
    };
    let fault = if since.is_none() {
        Some("programs may not write it".to_owned())
    } else if field.is_whole(offset, bytes) {
        None
    } else {
        // Kernels differ in what they allow, stable ones among themselves.
        Some(format!(
            "{bytes} bytes {verb} at offset {offset}, where the field has {}: access all of it, and mask after",
            field.bytes
        ))
    };
    (what, since, fault)
}

#[cfg(test)]
mod tests;
