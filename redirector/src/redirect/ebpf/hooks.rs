//! Attaching to a pod's interfaces and namespace, and finding again what is attached.
//!
//! Functions that name an interface run in the pod's namespace.

use std::{fs, io, path::Path};

use super::object::{self, DialRule, EGRESS, INGRESS};
use crate::{
    redirect::Error,
    sys::{interfaces::Interface, netns::Netns},
};
use aya::{
    Ebpf,
    programs::{
        LinkOrder, ProgramError, SchedClassifier, TcAttachType,
        links::{FdLink, LinkError, PinnedLink},
        sk_lookup::SkLookupLink,
        tc::{self, NlOptions, SchedClassifierLink, TcAttachOptions, TcError, TcHandle},
    },
    sys::SyscallError,
};

/// How TC programs are attached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TcMode {
    /// TCX links, pinned: 6.6 on.
    Tcx,
    /// Filters of a clsact qdisc.
    Clsact,
}

/// Priority of our clsact filters: before those that the kernel numbers itself (49152 on), and nobody else's.
const FILTER_PRIORITY: u16 = 1337;
/// Handle of our clsact filters.
const FILTER_HANDLE: TcHandle = TcHandle::new(0, 1);

const DIRECTIONS: [(&str, TcAttachType); 2] =
    [(INGRESS, TcAttachType::Ingress), (EGRESS, TcAttachType::Egress)];

/// Name of the pin of the SK_LOOKUP link.
const LOOKUP_LINK: &str = "link_lookup";

fn link_name(program: &str, interface: &Interface) -> String {
    format!("link_{program}_{}", interface.index)
}

/// A hook that holds as long as this value does, or for good once it is kept.
pub(super) enum Hook {
    /// A TC link or filter.
    Tc(String, SchedClassifierLink),
    /// The SK_LOOKUP link.
    Lookup(SkLookupLink),
}

impl Hook {
    /// Hands the hook to the kernel: a link is pinned in `directory`, a filter holds by itself.
    pub(super) fn keep(self, directory: &Path) -> Result<(), Error> {
        let (name, link) = match self {
            Self::Tc(name, link) => match <&FdLink>::try_from(&link) {
                Ok(_) => (name, FdLink::try_from(link)),
                Err(_) => {
                    std::mem::forget(link);
                    return Ok(());
                }
            },
            Self::Lookup(link) => (LOOKUP_LINK.to_owned(), Ok(link.into())),
        };
        let path = directory.join(name);
        let failed = format!("pinning {}", path.display());
        link.map_err(|error| Error::new(failed.clone(), error))?
            .pin(&path)
            // The kernel holds the link by its pin; the descriptor goes with the returned value.
            .map(drop)
            .map_err(|error| Error::new(failed, error))
    }
}

/// Attaches the SK_LOOKUP program to the namespace.
pub(super) fn attach_lookup(ebpf: &mut Ebpf, rule: DialRule, netns: &Netns) -> Result<Hook, Error> {
    let program = object::lookup(ebpf, rule)?;
    let failed =
        |error: ProgramError| Error::new(format!("attaching {} to {}", rule.program(), netns.id()), error);
    let id = program.attach(netns).map_err(failed)?;
    program.take_link(id).map(Hook::Lookup).map_err(failed)
}

/// Attaches the TC programs to one interface, ingress first: capture begins when everything else is in place.
pub(super) fn attach_tc(ebpf: &mut Ebpf, mode: TcMode, interface: &Interface) -> Result<Vec<Hook>, Error> {
    let mut hooks = Vec::new();
    for (name, direction) in DIRECTIONS {
        let program: &mut SchedClassifier = object::program(ebpf, name)?;
        let failed = attaching(name, interface);
        let options = match mode {
            TcMode::Tcx => TcAttachOptions::TcxOrder(LinkOrder::default()),
            TcMode::Clsact => {
                add_clsact(interface)?;
                TcAttachOptions::Netlink(NlOptions {
                    priority: FILTER_PRIORITY,
                    handle: FILTER_HANDLE,
                    classid: None,
                })
            }
        };
        let id = program
            .attach_with_options(&interface.name, direction, options)
            .map_err(&failed)?;
        hooks.push(Hook::Tc(
            link_name(name, interface),
            program.take_link(id).map_err(&failed)?,
        ));
    }
    Ok(hooks)
}

/// Puts the programs of a new instance into the clsact filters that an earlier one has on the interface.
pub(super) fn replace_filters(ebpf: &mut Ebpf, interface: &Interface) -> Result<Vec<Hook>, Error> {
    let mut hooks = Vec::new();
    for (name, direction) in DIRECTIONS {
        let program: &mut SchedClassifier = object::program(ebpf, name)?;
        let failed = attaching(name, interface);
        let link =
            SchedClassifierLink::attached(&interface.name, direction, FILTER_PRIORITY, FILTER_HANDLE, None)
                .map_err(|error| failed(TcError::IoError(error).into()))?;
        let id = program.attach_to_link(link).map_err(&failed)?;
        hooks.push(Hook::Tc(
            link_name(name, interface),
            program.take_link(id).map_err(&failed)?,
        ));
    }
    Ok(hooks)
}

/// Adds the qdisc that filters hang on; it may be there, and others may use it, so it is never removed.
fn add_clsact(interface: &Interface) -> Result<(), Error> {
    match tc::qdisc_add_clsact(&interface.name) {
        Ok(()) => Ok(()),
        Err(error) if raw_os_error(&error) == Some(libc::EEXIST) => Ok(()),
        Err(error) => Err(Error::new(format!("adding clsact to {}", interface.name), error)),
    }
}

fn attaching(program: &str, interface: &Interface) -> impl Fn(ProgramError) -> Error + use<> {
    let operation = format!("attaching {program} to {}", interface.name);
    move |error| Error::new(operation.clone(), error)
}

/// Whether the pinned TCX links of `directory` are attached to `interface`, in both directions.
pub(super) fn tcx_in_place(directory: &Path, interface: &Interface) -> bool {
    DIRECTIONS.iter().all(|(name, direction)| {
        let Ok(link) = PinnedLink::from_pin(directory.join(link_name(name, interface))) else {
            return false;
        };
        let Ok(info) = FdLink::from(link).info() else {
            return false;
        };
        SchedClassifier::query_tcx(&interface.name, *direction)
            .is_ok_and(|(_, programs)| programs.iter().any(|program| program.id() == info.program_id()))
    })
}

/// Whether the pinned programs of `directory` are in our clsact filters of `interface`; they are put there if a filter of ours
/// holds another.
pub(super) fn filters_in_place(directory: &Path, interface: &Interface) -> bool {
    DIRECTIONS.iter().all(|(name, direction)| {
        let Ok(mut program) = SchedClassifier::from_pin(directory.join(name)) else {
            return false;
        };
        let place =
            SchedClassifierLink::attached(&interface.name, *direction, FILTER_PRIORITY, FILTER_HANDLE, None);
        let Some(id) = place.ok().and_then(|place| program.attach_to_link(place).ok()) else {
            return false;
        };
        program.take_link(id).map(std::mem::forget).is_ok()
    })
}

/// Whether the SK_LOOKUP link is there.
pub(super) fn lookup_in_place(directory: &Path) -> bool {
    PinnedLink::from_pin(directory.join(LOOKUP_LINK)).is_ok()
}

/// Removes our clsact filters from an interface; none is success. Only filters with our programs' names go.
pub(super) fn detach_filters(interface: &Interface) -> Vec<Error> {
    let mut errors = Vec::new();
    // Egress first: no packet is turned back to what is about to go.
    for (name, direction) in DIRECTIONS.into_iter().rev() {
        match tc::qdisc_detach_program(&interface.name, direction, name) {
            Ok(()) => {}
            Err(error) if is_absence(&error) => {}
            Err(error) => errors.push(Error::new(
                format!("detaching {name} from {}", interface.name),
                error,
            )),
        }
    }
    errors
}

/// Removes every pin of an instance, the links first, and its directory. What held by a pin alone is detached with it.
pub(super) fn unpin(directory: &Path) -> Vec<Error> {
    let mut errors = Vec::new();
    let entries = match fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return errors,
        Err(error) => return vec![Error::new(format!("listing {}", directory.display()), error)],
    };
    let mut paths: Vec<_> = entries.flatten().map(|entry| entry.path()).collect();
    // `link_redir_egress_*` sorts before the ingress and lookup links, and links before maps and programs.
    paths.sort_by_key(|path| (!path.to_string_lossy().contains("/link_"), path.clone()));
    for path in paths {
        if let Err(error) = fs::remove_file(&path) {
            errors.push(Error::new(format!("removing {}", path.display()), error));
        }
    }
    if let Err(error) = fs::remove_dir(directory) {
        errors.push(Error::new(format!("removing {}", directory.display()), error));
    }
    errors
}

/// The errno at the bottom of an error, if there is one.
pub(super) fn raw_os_error(error: &(dyn std::error::Error + 'static)) -> Option<i32> {
    let mut cause = Some(error);
    let mut found = None;
    while let Some(error) = cause {
        if let Some(io) = error.downcast_ref::<io::Error>() {
            found = io.raw_os_error().or(found);
        }
        if let Some(LinkError::SyscallError(SyscallError { io_error, .. })) =
            error.downcast_ref::<LinkError>()
        {
            found = io_error.raw_os_error().or(found);
        }
        cause = error.source();
    }
    found
}

fn is_absence(error: &TcError) -> bool {
    matches!(error, TcError::IoError(io) if io.kind() == io::ErrorKind::NotFound)
        || matches!(
            raw_os_error(error),
            Some(libc::ENOENT | libc::EINVAL | libc::ENODEV)
        )
}
