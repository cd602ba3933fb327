//! The embedded eBPF object: one load makes the programs and maps of one pod.

use std::{
    hash::{DefaultHasher, Hash, Hasher},
    io,
    path::Path,
    sync::{Mutex, PoisonError},
};

use aya::{
    Ebpf, EbpfLoader, VerifierLogLevel, include_bytes_aligned,
    programs::{Program, ProgramError, SchedClassifier, SkLookup},
};

use crate::redirect::Error;

/// The object as embedded: built by `cargo xtask ebpf`, empty in a build without the eBPF toolchain.
pub static OBJECT: &[u8] = include_bytes_aligned!(concat!(env!("OUT_DIR"), "/redirector.bpf.o"));

/// Name of the TC egress program in the object.
pub const EGRESS: &str = "redir_egress";
/// Name of the TC ingress program in the object.
pub const INGRESS: &str = "redir_ingress";
const LOOKUP: &str = "redir_lookup";
const LOOKUP_BY_PORT: &str = "redir_lookup_old";

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
    /// Of the bytes of the object: instances of another build are replaced.
    pub(super) build: u64,
    /// What this kernel can.
    pub(super) dial_rule: DialRule,
}

impl Object {
    /// Prepares loading with shared maps pinned in `shared`, and tries it once: so a missing right, a kernel without a needed
    /// feature or an absent object is told at start and not at the first pod.
    pub(super) fn open(shared: &Path, force_source_port: bool) -> Result<Self, Error> {
        let mut loader = EbpfLoader::new();
        loader
            .map_pin_path("TAGS", shared.join("TAGS"))
            .map_pin_path("AYA_LOGS", shared.join("AYA_LOGS"));
        loader.verifier_log_level(VerifierLogLevel::STATS);
        let mut hasher = DefaultHasher::new();
        OBJECT.hash(&mut hasher);
        let mut object = Self {
            loader: Mutex::new(loader),
            build: hasher.finish(),
            dial_rule: DialRule::SourcePort,
        };
        let mut trial = object.load()?;
        if !force_source_port {
            match lookup(&mut trial, DialRule::Device)?.load() {
                Ok(()) => object.dial_rule = DialRule::Device,
                Err(error) => {
                    tracing::info!(%error, "SK_LOOKUP does not tell the device here; the source port will do")
                }
            }
        }
        object.load_programs(&mut trial)?;
        Ok(object)
    }

    /// New maps, and programs that are not loaded yet.
    pub(super) fn load(&self) -> Result<Ebpf, Error> {
        let mut loader = self.loader.lock().unwrap_or_else(PoisonError::into_inner);
        loader
            .load(OBJECT)
            .map_err(|error| Error::new("creating the eBPF maps", with_advice(error)))
    }

    /// Loads the programs into the kernel.
    pub(super) fn load_programs(&self, ebpf: &mut Ebpf) -> Result<(), Error> {
        let failed = |program: &str| {
            let operation = format!("loading the eBPF program {program}");
            move |error| Error::new(operation, with_advice(error))
        };
        for name in [EGRESS, INGRESS] {
            program::<SchedClassifier>(ebpf, name)?
                .load()
                .map_err(failed(name))?;
        }
        let lookup = lookup(ebpf, self.dial_rule)?;
        match lookup.load() {
            // The trial load of `open` has left it loaded.
            Ok(()) | Err(ProgramError::AlreadyLoaded) => Ok(()),
            Err(error) => Err(failed(self.dial_rule.program())(error)),
        }
    }
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
