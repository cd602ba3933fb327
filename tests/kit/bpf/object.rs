//! An object file as it is loaded: aya's own reader links every program with the functions it calls.

use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    env,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};
use aya_obj::{EbpfSectionKind, Object, ProgramSection};

use super::{Kind, features, insn::Insn};

/// Programs and maps of an object.
#[derive(Debug)]
pub struct Loaded {
    /// By name.
    pub programs: BTreeMap<String, Program>,
    /// By the descriptor that instructions name them by.
    pub maps: BTreeMap<i32, Map>,
}

/// A program with the functions it calls.
#[derive(Debug)]
pub struct Program {
    /// Its type.
    pub kind: Kind,
    /// Its instructions; the functions come after it.
    pub insns: Vec<Insn>,
}

/// A map's definition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Map {
    /// Its name.
    pub name: String,
    /// `enum bpf_map_type`.
    pub map_type: u32,
    /// `BPF_F_*`.
    pub flags: u32,
}

/// Where the build leaves the object.
pub fn path() -> PathBuf {
    env::var_os("REDIRECTOR_EBPF_OBJECT").map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/bpf/redirector.bpf.o"),
        PathBuf::from,
    )
}

impl Loaded {
    /// Reads an object file.
    ///
    /// # Errors
    /// What is not an object, or has a program of a type that the tables do not know.
    pub fn read(file: &[u8]) -> Result<Self> {
        let mut object = Object::parse(file).context("reading the object")?;
        let text: HashSet<usize> = object.functions.keys().map(|(section, _)| *section).collect();
        let mut definitions: Vec<_> = object.maps.clone().into_iter().collect();
        definitions.sort_by(|a, b| a.0.cmp(&b.0));
        // The descriptors are only names here; nothing is loaded.
        let descriptors = definitions
            .iter()
            .zip(1..)
            .map(|((name, map), fd)| (name.as_str(), fd, map));
        object
            .relocate_maps(descriptors, &text)
            .context("linking the maps")?;
        object.relocate_calls(&text).context("linking the functions")?;
        let maps = definitions.iter().zip(1..).map(|((name, map), fd)| {
            let map = Map {
                name: name.clone(),
                map_type: map.map_type(),
                flags: flags(map),
            };
            (fd, map)
        });
        let mut programs = BTreeMap::new();
        for (name, program) in &object.programs {
            let kind = match &program.section {
                ProgramSection::SchedClassifier => Kind::Classifier,
                ProgramSection::SkLookup => Kind::Lookup,
                other => {
                    bail!("program {name} is a {other:?}, of which the tables know nothing: extend kit/bpf")
                }
            };
            let linked = &object.functions[&program.function_key()];
            let insns = linked.instructions.iter().map(|insn| Insn {
                code: insn.code,
                dst: insn.dst_reg(),
                src: insn.src_reg(),
                off: insn.off,
                imm: insn.imm,
            });
            let program = Program {
                kind,
                insns: insns.collect(),
            };
            programs.insert(name.clone(), program);
        }
        Ok(Self {
            programs,
            maps: maps.collect(),
        })
    }

    /// Descriptors of the maps that hold sockets.
    pub(super) fn socket_maps(&self) -> BTreeSet<i32> {
        self.maps
            .iter()
            .filter(|(_, map)| features::holds_sockets(map.map_type))
            .map(|(fd, _)| *fd)
            .collect()
    }
}

/// Constants are loaded as an array that programs cannot write.
fn flags(map: &aya_obj::Map) -> u32 {
    /// `BPF_F_RDONLY_PROG`.
    const RDONLY_PROG: u32 = 1 << 7;
    let own = map.map_flags();
    match map.section_kind() {
        EbpfSectionKind::Rodata => own | RDONLY_PROG,
        _ => own,
    }
}
