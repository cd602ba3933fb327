//! What a run of each eBPF program costs, as the kernel counts it while statistics are switched on. They are on only while
//! somebody here asks, since the counting itself costs more than a small program; what it costs is measured by an empty program,
//! in the same round and under the same load, and subtracted.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    os::fd::{AsFd, AsRawFd, OwnedFd},
};

use anyhow::{Context, Result};
use aya::{
    Ebpf,
    programs::{LinkOrder, SchedClassifier, TcAttachType, loaded_programs, tc::TcAttachOptions},
    sys::{Stats, enable_stats},
};
use object::{
    Architecture, BinaryFormat, Endianness, SectionKind, SymbolFlags, SymbolKind, SymbolScope,
    write::{Object, Symbol, SymbolSection},
};
use redirector_tests::netns::Namespace;

/// Identifies a loaded program. The kernel gives every new one a higher number.
pub(crate) type Id = u32;

/// Runs of a program.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Runs {
    pub(crate) count: u64,
    pub(crate) time_ns: u64,
}

impl Runs {
    /// Nanoseconds per run.
    pub(crate) fn average_ns(self) -> Option<f64> {
        (self.count > 0).then(|| self.time_ns as f64 / self.count as f64)
    }
}

/// The programs that are loaded now.
pub(crate) fn loaded() -> Result<BTreeSet<Id>> {
    loaded_programs()
        .map(|program| Ok(program?.id()))
        .collect::<Result<_>>()
        .context("listing the loaded eBPF programs")
}

/// Switches the kernel's statistics on while it lives, even if this process is killed.
pub(crate) struct Counting {
    _on: OwnedFd,
}

impl Counting {
    pub(crate) fn start() -> Result<Self> {
        let on = enable_stats(Stats::RunTime).context("switching the statistics of eBPF programs on")?;
        Ok(Self { _on: on })
    }
}

/// Runs of those of the programs that ran during `work`, by name; instances of one program are added up. Statistics are on.
pub(crate) fn runs_during(
    _: &Counting,
    ids: &BTreeSet<Id>,
    work: impl FnOnce() -> Result<()>,
) -> Result<BTreeMap<String, Runs>> {
    let before = runs(ids)?;
    work()?;
    let mut by_name: BTreeMap<String, Runs> = BTreeMap::new();
    for (id, (name, after)) in runs(ids)? {
        let before = before.get(&id).map(|(_, runs)| *runs).unwrap_or_default();
        let sum = by_name.entry(name).or_default();
        sum.count += after.count - before.count;
        sum.time_ns += after.time_ns - before.time_ns;
    }
    by_name.retain(|_, runs| runs.count > 0);
    Ok(by_name)
}

fn runs(ids: &BTreeSet<Id>) -> Result<BTreeMap<Id, (String, Runs)>> {
    let mut found = BTreeMap::new();
    for program in loaded_programs() {
        let program = program.context("listing the loaded eBPF programs")?;
        if !ids.contains(&program.id()) {
            continue;
        }
        // It may be unloaded at any time.
        let Ok(fd) = program.fd() else { continue };
        let path = format!("/proc/self/fdinfo/{}", fd.as_fd().as_raw_fd());
        let text = fs::read_to_string(&path).with_context(|| format!("reading {path}"))?;
        let runs = parse_runs(&text).context("the kernel does not count runs of eBPF programs")?;
        let name = program.name_as_str().unwrap_or("nameless").to_owned();
        found.insert(program.id(), (name, runs));
    }
    Ok(found)
}

fn parse_runs(fdinfo: &str) -> Option<Runs> {
    let field = |name: &str| -> Option<u64> {
        let line = fdinfo.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim().parse().ok()
    };
    Some(Runs {
        count: field("run_cnt:")?,
        time_ns: field("run_time_ns:")?,
    })
}

/// An empty program at both hooks of a pod's eth0, until it is dropped.
pub(crate) struct Empty {
    _programs: Ebpf,
    pub(crate) ids: BTreeSet<Id>,
}

impl Empty {
    /// Attaches it. It needs TCX links, Linux 6.6.
    pub(crate) fn attach(ns: &Namespace) -> Result<Self> {
        let mut programs = Ebpf::load(&empty_object()?).context("loading the empty program")?;
        let mut ids = BTreeSet::new();
        let program: &mut SchedClassifier = programs
            .program_mut(EMPTY)
            .context("the empty program is not in its object")?
            .try_into()?;
        program.load().context("loading the empty program")?;
        ids.insert(program.info()?.id());
        for hook in [TcAttachType::Egress, TcAttachType::Ingress] {
            let options = TcAttachOptions::TcxOrder(LinkOrder::default());
            ns.run(|| program.attach_with_options("eth0", hook, options))
                .context("attaching the empty program")?;
        }
        Ok(Self {
            _programs: programs,
            ids,
        })
    }
}

const EMPTY: &str = "empty";

/// An object with one TC program, which returns TCX_NEXT.
fn empty_object() -> Result<Vec<u8>> {
    /// r0 = -1; exit
    const CODE: [u8; 16] = [0xb7, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 0x95, 0, 0, 0, 0, 0, 0, 0];
    let mut object = Object::new(BinaryFormat::Elf, Architecture::Bpf, Endianness::Little);
    let code = object.add_section(Vec::new(), b"classifier".to_vec(), SectionKind::Text);
    object.append_section_data(code, &CODE, 8);
    let license = object.add_section(Vec::new(), b"license".to_vec(), SectionKind::Data);
    object.append_section_data(license, b"Dual MIT/GPL\0", 1);
    object.add_symbol(Symbol {
        name: EMPTY.as_bytes().to_vec(),
        value: 0,
        size: CODE.len() as u64,
        kind: SymbolKind::Text,
        scope: SymbolScope::Dynamic,
        weak: false,
        section: SymbolSection::Section(code),
        flags: SymbolFlags::None,
    });
    object.write().context("writing the empty program's object")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_text_is_read() {
        let text = "pos:\t0\nprog_type:\t3\nrun_time_ns:\t5000\nrun_cnt:\t50\nrecursion_misses:\t0\n";
        let runs = parse_runs(text).unwrap();
        assert_eq!(runs.average_ns(), Some(100.0));
        assert_eq!(parse_runs("prog_type:\t3\n"), None);
        assert_eq!(Runs::default().average_ns(), None);
    }

    #[test]
    fn the_empty_object_is_one() {
        assert!(empty_object().unwrap().starts_with(b"\x7fELF"));
    }
}
