//! The embedded eBPF object: loaded once for the programs that all pods share, and once more for each pod's own.

use std::{
    hash::{DefaultHasher, Hash, Hasher},
    io,
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
};

use aya::{
    Ebpf, EbpfLoader, VerifierLogLevel, include_bytes_aligned,
    maps::ProgramArray,
    programs::{Program, ProgramError, ProgramFd, SchedClassifier, SkLookup},
};
use redirector_common::maps::{
    ADDRESSES, COUNTERS, DECIDERS, Decider, FACTS, HINTS, LISTENERS, MAX_SLOTS, PODS, PROBERS, PROXIES,
    RULES, SLOT, TAGS, TRACED,
};

use super::pins::Build;
use crate::redirect::Error;

/// The object as embedded: built by `cargo xtask ebpf`, empty in a build without the eBPF toolchain.
pub static OBJECT: &[u8] = include_bytes_aligned!(concat!(env!("OUT_DIR"), "/redirector.bpf.o"));

/// Name of a pod's TC egress program in the object.
pub const EGRESS: &str = "redir_egress";
/// Name of a pod's TC ingress program in the object.
pub const INGRESS: &str = "redir_ingress";
/// Names of the programs that all pods share, and their places.
pub const SHARED: [(&str, Decider); 2] = [
    ("redir_out_decide", Decider::Egress),
    ("redir_in_decide", Decider::Ingress),
];
const LOOKUP: &str = "redir_lookup";
const LOOKUP_BY_PORT: &str = "redir_lookup_old";
/// Name of the map of debug records.
const LOGS: &str = "AYA_LOGS";

/// Where the maps of a build are pinned: those that the node shares in `shared`, and the others in the build's directory.
pub(super) fn pins_of(shared: &Path, build: &Build) -> Vec<(&'static str, PathBuf)> {
    let of_node = [TAGS, LOGS].map(|name| (name, shared.join(name)));
    let of_build = [
        PODS, FACTS, TRACED, ADDRESSES, RULES, LISTENERS, COUNTERS, DECIDERS, PROBERS, PROXIES, HINTS,
    ]
    .map(|name| (name, build.maps().join(name)));
    of_node.into_iter().chain(of_build).collect()
}

/// Numbers that live as long as the loader asks for.
static SLOTS: [u32; MAX_SLOTS] = {
    let mut slots = [0; MAX_SLOTS];
    let mut slot = 0;
    while slot < MAX_SLOTS {
        slots[slot] = slot as u32;
        slot += 1;
    }
    slots
};

/// How the SK_LOOKUP program tells the proxy's own dial to the application.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DialRule {
    /// By its device, lo: 5.17 on.
    Device,
    /// By its source port.
    SourcePort,
}

impl DialRule {
    pub(super) const fn program(self) -> &'static str {
        match self {
            Self::Device => LOOKUP,
            Self::SourcePort => LOOKUP_BY_PORT,
        }
    }
}

/// Loads the object, again and again.
pub(super) struct Object {
    // One loader for all loads: making one reads the kernel's BTF, which takes longer than all else.
    loader: Mutex<EbpfLoader<'static>>,
    /// What this kernel can.
    pub(super) dial_rule: DialRule,
}

/// What tells this build of the object from others: instances of another are replaced.
pub(super) fn build_hash() -> u64 {
    let mut hasher = DefaultHasher::new();
    OBJECT.hash(&mut hasher);
    hasher.finish()
}

impl Object {
    /// Prepares loading with the maps of these names pinned there, and the others nowhere. Tries what this kernel can.
    pub(super) fn prepare(
        pinned: impl IntoIterator<Item = (&'static str, PathBuf)>,
        force_source_port: bool,
    ) -> Result<Self, Error> {
        let mut loader = EbpfLoader::new();
        loader.verifier_log_level(VerifierLogLevel::STATS);
        // The programs have nothing to relocate by the kernel's own types, and these take some 12 MiB.
        loader.btf(None);
        for (name, path) in pinned {
            loader.map_pin_path(name, path);
        }
        let mut object = Self {
            loader: Mutex::new(loader),
            dial_rule: DialRule::SourcePort,
        };
        if !force_source_port {
            let mut trial = object.load(0)?;
            match lookup(&mut trial, DialRule::Device)?.load() {
                Ok(()) => object.dial_rule = DialRule::Device,
                Err(error) => {
                    tracing::info!(%error, "SK_LOOKUP does not tell the device here; the source port will do")
                }
            }
        }
        Ok(object)
    }

    /// The object for one pod. Its programs are not loaded yet.
    pub(super) fn load(&self, slot: u32) -> Result<Ebpf, Error> {
        let mut loader = self.loader.lock().unwrap_or_else(PoisonError::into_inner);
        loader.override_global(SLOT, &SLOTS[slot as usize], true);
        loader
            .load(OBJECT)
            .map_err(|error| Error::new("creating the eBPF maps", with_advice(error)))
    }

    /// Loads a pod's own programs into the kernel.
    pub(super) fn load_own(&self, ebpf: &mut Ebpf) -> Result<(), Error> {
        for name in [EGRESS, INGRESS] {
            load_classifier(ebpf, name)?;
        }
        let name = self.dial_rule.program();
        lookup(ebpf, self.dial_rule)?
            .load()
            .map_err(|error| Error::new(loading(name), with_advice(error)))
    }
}

/// A program that decides.
pub(super) struct Loaded {
    pub(super) decider: Decider,
    /// The kernel's number of it.
    pub(super) id: u32,
    pub(super) fd: ProgramFd,
}

/// Loads the programs that all pods share into the kernel, and puts them where the pods' own go on to. They replace those of an
/// earlier agent without a gap.
pub(super) fn load_shared(ebpf: &mut Ebpf) -> Result<Vec<Loaded>, Error> {
    let mut all = Vec::new();
    for (name, decider) in SHARED {
        load_classifier(ebpf, name)?;
        let failed = format!("putting {name} into {DECIDERS}");
        let program = program::<SchedClassifier>(ebpf, name)?;
        let loaded = program.info().and_then(|info| {
            let fd = program.fd()?.try_clone().map_err(ProgramError::IOError)?;
            Ok(Loaded {
                decider,
                id: info.id(),
                fd,
            })
        });
        let loaded = loaded.map_err(|error| Error::new(failed.clone(), error))?;
        let map = ebpf
            .map_mut(DECIDERS)
            .ok_or_else(|| Error::new(failed.clone(), "no such map in the object"))?;
        ProgramArray::try_from(map)
            .and_then(|mut map| map.set(decider as u32, &loaded.fd, 0))
            .map_err(|error| Error::new(failed, error))?;
        all.push(loaded);
    }
    Ok(all)
}

fn load_classifier(ebpf: &mut Ebpf, name: &str) -> Result<(), Error> {
    program::<SchedClassifier>(ebpf, name)?
        .load()
        .map_err(|error| Error::new(loading(name), with_advice(error)))
}

fn loading(program: &str) -> String {
    format!("loading the eBPF program {program}")
}

/// Refuses to go on with an `object` that a build without the eBPF toolchain has left empty.
pub(super) fn check_embedded(object: &[u8]) -> Result<(), Error> {
    if object.is_empty() {
        return Err(Error::new(
            "loading the eBPF programs",
            "this binary was built without eBPF; build the object with `cargo xtask ebpf` and then the binary again",
        ));
    }
    Ok(())
}

/// A program of an instance.
pub(super) fn program<'a, P>(ebpf: &'a mut Ebpf, name: &str) -> Result<&'a mut P, Error>
where
    &'a mut P: TryFrom<&'a mut Program, Error = ProgramError>,
{
    let failed = || format!("finding the eBPF program {name}");
    ebpf.program_mut(name)
        .ok_or_else(|| Error::new(failed(), "not in the object"))?
        .try_into()
        .map_err(|error| Error::new(failed(), error))
}

/// The SK_LOOKUP program of an instance.
pub(super) fn lookup(ebpf: &mut Ebpf, rule: DialRule) -> Result<&mut SkLookup, Error> {
    program(ebpf, rule.program())
}

/// An error of the kernel's with what to do about it.
#[derive(Debug, thiserror::Error)]
#[error("{source}{advice}")]
struct Advised<E: std::error::Error + 'static> {
    source: E,
    advice: &'static str,
}

/// The kernel's own "not supported", which no libc names (`include/linux/errno.h`).
const ENOTSUPP: i32 = 524;

fn with_advice<E: std::error::Error + 'static>(source: E) -> Advised<E> {
    let mut cause: Option<&dyn std::error::Error> = Some(&source);
    let mut kind = None;
    while let Some(error) = cause {
        if let Some(io) = error.downcast_ref::<io::Error>() {
            kind = io.raw_os_error();
        }
        cause = error.source();
    }
    let advice = match kind {
        Some(libc::EPERM | libc::EACCES) => {
            "; run as root, or with CAP_BPF, CAP_NET_ADMIN and CAP_SYS_ADMIN (and before Linux 5.11 with an unlimited memlock)"
        }
        Some(libc::EINVAL | ENOTSUPP | libc::EOPNOTSUPP) => {
            "; this kernel may lack a feature: Linux 5.10 or later with CONFIG_BPF_SYSCALL, CONFIG_INET, CONFIG_NET_CLS_BPF and \
             CONFIG_NET_SCH_INGRESS is needed"
        }
        _ => "",
    };
    Advised { source, advice }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::Chain;

    #[test]
    fn a_binary_without_ebpf_says_how_to_get_one_with_it() {
        let error = check_embedded(b"").unwrap_err();
        assert!(
            Chain(&error).to_string().contains("`cargo xtask ebpf`"),
            "{error}"
        );
        assert!(check_embedded(b"\x7fELF").is_ok());
    }

    #[test]
    fn the_kernels_refusals_come_with_advice() {
        for (errno, advice) in [
            (libc::EPERM, "run as root"),
            (libc::EACCES, "run as root"),
            (libc::EINVAL, "Linux 5.10 or later"),
            (ENOTSUPP, "Linux 5.10 or later"),
        ] {
            let error = with_advice(io::Error::from_raw_os_error(errno));
            assert!(error.to_string().contains(advice), "{error}");
        }
        let other = io::Error::from_raw_os_error(libc::ENOSPC);
        assert_eq!(
            with_advice(io::Error::from_raw_os_error(libc::ENOSPC)).to_string(),
            other.to_string()
        );
    }
}
