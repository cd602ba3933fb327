//! Attaching to a pod's interfaces and namespace, and finding again what is attached.
//!
//! Functions that name an interface run in the pod's namespace.

use std::{fs, io, os::fd::AsFd, path::Path};

use super::{
    filters::{self, Filter},
    object::{self, DialRule, EGRESS, INGRESS},
    report,
};
use crate::{
    redirect::Error,
    sys::{bpf, interfaces::Interface, netlink::Netlink, netns::Netns},
};
use aya::{
    Ebpf,
    programs::{
        LinkOrder, ProgramError, SchedClassifier, TcAttachType,
        links::{FdLink, LinkError, PinnedLink},
        sk_lookup::SkLookupLink,
        tc::{
            self, NlOptions, SchedClassifierLink, SchedClassifierLinkId, TcAttachOptions, TcError, TcHandle,
        },
    },
    sys::SyscallError,
    util::KernelVersion,
};

/// How TC programs are attached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TcMode {
    /// TCX links, pinned: 6.6 on.
    Tcx,
    /// Filters of a clsact qdisc.
    Clsact,
}

impl TcMode {
    /// The best that this kernel has.
    pub(super) fn of_kernel(force_clsact: bool) -> Self {
        let has_tcx = KernelVersion::current().is_ok_and(|version| version >= KernelVersion::new(6, 6, 0));
        if has_tcx && !force_clsact {
            Self::Tcx
        } else {
            Self::Clsact
        }
    }
}

/// Handle of our clsact filters, in a priority that nobody else has.
const FILTER_HANDLE: TcHandle = TcHandle::new(0, 1);

const DIRECTIONS: [(&str, TcAttachType); 2] =
    [(INGRESS, TcAttachType::Ingress), (EGRESS, TcAttachType::Egress)];

/// The directions in which the programs are on an interface: on lo, which they are on where another process is the proxy, what arrives.
fn directions(interface: &Interface) -> &'static [(&'static str, TcAttachType)] {
    let count = if interface.loopback { 1 } else { DIRECTIONS.len() };
    &DIRECTIONS[..count]
}

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

/// What becomes of a filter that an earlier agent, or another instance, has left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Earlier {
    /// It gets the new program, without a moment in between in which there is none.
    Replaced,
    /// It is in the way.
    Refused,
}

/// Attaches the TC programs to one interface, ingress first: capture begins when everything else is in place. Filters need
/// the qdisc: [`add_clsact`].
pub(super) fn attach_tc(
    ebpf: &mut Ebpf,
    mode: TcMode,
    interface: &Interface,
    earlier: Earlier,
) -> Result<Vec<Hook>, Error> {
    let mut hooks = Vec::new();
    for &(name, direction) in directions(interface) {
        let program: &mut SchedClassifier = object::program(ebpf, name)?;
        let failed = attaching(name, interface);
        let id = match mode {
            TcMode::Tcx => {
                // Before all that are there: one that ends the run, with TCX_PASS say, would hide packets from ours. Those that
                // ours leaves alone go on to the others.
                let first = TcAttachOptions::TcxOrder(LinkOrder::first());
                program
                    .attach_with_options(&interface.name, direction, first)
                    .map_err(&failed)?
            }
            TcMode::Clsact => attach_filter(program, name, direction, interface, earlier)?,
        };
        hooks.push(Hook::Tc(
            link_name(name, interface),
            program.take_link(id).map_err(&failed)?,
        ));
    }
    Ok(hooks)
}

/// Puts a program into the filter of ours that is there, or into a new one beside all others.
fn attach_filter(
    program: &mut SchedClassifier,
    name: &str,
    direction: TcAttachType,
    interface: &Interface,
    earlier: Earlier,
) -> Result<SchedClassifierLinkId, Error> {
    let failed = attaching(name, interface);
    let refused = |error: io::Error| failed(TcError::IoError(error).into());
    let mut netlink = Netlink::open().map_err(refused)?;
    let all = filters::filters(&mut netlink, interface.index, direction).map_err(refused)?;
    let mut ours = filters::ours(&all, name);
    let Some(first) = ours.next() else {
        let place = NlOptions {
            priority: filters::free_priority(&all).map_err(refused)?,
            handle: FILTER_HANDLE,
            classid: None,
        };
        return program
            .attach_with_options(&interface.name, direction, TcAttachOptions::Netlink(place))
            .map_err(failed);
    };
    if earlier == Earlier::Refused {
        return Err(refused(io::Error::other(
            "a filter of that name is there already, of an agent or of another `redirector load`",
        )));
    }
    let at = |filter: &Filter| {
        let handle = TcHandle::from(filter.handle);
        SchedClassifierLink::attached(&interface.name, direction, filter.priority, handle, None)
            .map_err(refused)
    };
    let id = program.attach_to_link(at(first)?).map_err(&failed)?;
    for extra in ours {
        // Dropping it removes the filter.
        drop(at(extra)?);
    }
    Ok(id)
}

/// Puts the programs that are pinned in `directory` back into the filters of ours that there are on an interface.
pub(super) fn put_back(directory: &Path, interface: &Interface) -> Result<(), Error> {
    let failed = |error: io::Error| Error::new(format!("reading the filters of {}", interface.name), error);
    for &(name, direction) in directions(interface) {
        let mut netlink = Netlink::open().map_err(failed)?;
        let all = filters::filters(&mut netlink, interface.index, direction).map_err(failed)?;
        if filters::ours(&all, name).next().is_none() {
            continue;
        }
        let mut program =
            SchedClassifier::from_pin(directory.join(name)).map_err(attaching(name, interface))?;
        let id = attach_filter(&mut program, name, direction, interface, Earlier::Replaced)?;
        let link = program.take_link(id).map_err(attaching(name, interface))?;
        // A filter holds by itself.
        std::mem::forget(link);
    }
    Ok(())
}

/// Adds the qdiscs that filters hang on; returns whether one was not there. Others may come to use it.
pub(super) fn add_clsact(interfaces: &[Interface]) -> Result<bool, Error> {
    let mut added = Vec::new();
    for interface in interfaces {
        match add_one_clsact(interface) {
            Ok(true) => added.push(interface.clone()),
            Ok(false) => {}
            Err(error) => {
                report(remove_clsact(&added));
                return Err(error);
            }
        }
    }
    Ok(!added.is_empty())
}

fn add_one_clsact(interface: &Interface) -> Result<bool, Error> {
    let failed = || format!("adding clsact to {}", interface.name);
    match tc::qdisc_add_clsact(&interface.name) {
        Ok(()) => return Ok(true),
        Err(error) if raw_os_error(&error) == Some(libc::EEXIST) => {}
        Err(error) => return Err(Error::new(failed(), error)),
    }
    let there = Netlink::open().and_then(|mut netlink| filters::has_clsact(&mut netlink, interface.index));
    if there.map_err(|error| Error::new(failed(), error))? {
        return Ok(false);
    }
    Err(Error::new(
        failed(),
        "somebody has put an ingress qdisc there, which has no place for what the interface sends: remove it (tc qdisc del dev NAME \
         ingress), or have them use clsact",
    ))
}

fn attaching(program: &str, interface: &Interface) -> impl Fn(ProgramError) -> Error + use<> {
    let operation = format!("attaching {program} to {}", interface.name);
    move |error| Error::new(operation.clone(), error)
}

/// The programs of an instance, by the kernel's ids.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Programs {
    /// In the order of the directions.
    tc: [u32; 2],
    lookup: u32,
}

impl Programs {
    /// Those pinned in `directory`; `None` when a pin is missing.
    pub(super) fn pinned(directory: &Path) -> Option<Self> {
        let tc = |name: &str| {
            let program = SchedClassifier::from_pin(directory.join(name)).ok()?;
            program.info().ok().map(|info| info.id())
        };
        let link = PinnedLink::from_pin(directory.join(LOOKUP_LINK)).ok()?;
        Some(Self {
            tc: [tc(DIRECTIONS[0].0)?, tc(DIRECTIONS[1].0)?],
            lookup: FdLink::from(link).info().ok()?.program_id(),
        })
    }

    /// Whether they are attached to an interface, in its directions, once.
    pub(super) fn are_on(&self, netlink: &mut Netlink, mode: TcMode, interface: &Interface) -> bool {
        directions(interface)
            .iter()
            .zip(self.tc)
            .all(|((name, direction), program)| match mode {
                TcMode::Tcx => {
                    let hook = match direction {
                        TcAttachType::Egress => bpf::Hook::TcxEgress(interface.index),
                        _ => bpf::Hook::TcxIngress(interface.index),
                    };
                    bpf::attached(hook).is_ok_and(|programs| programs.contains(&program))
                }
                TcMode::Clsact => {
                    let all = filters::filters(netlink, interface.index, *direction).unwrap_or_default();
                    let ours: Vec<_> = filters::ours(&all, name).collect();
                    matches!(ours[..], [only] if only.program == Some(program))
                }
            })
    }

    /// Whether the SK_LOOKUP program is attached to a namespace.
    pub(super) fn look_up_in(&self, netns: &Netns) -> bool {
        bpf::attached(bpf::Hook::SkLookup(netns.as_fd()))
            .is_ok_and(|programs| programs.contains(&self.lookup))
    }
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

/// Removes the qdiscs that [`add_clsact`] has added, where nobody has a filter.
pub(super) fn remove_clsact(interfaces: &[Interface]) -> Vec<Error> {
    let remove = |interface: &Interface| {
        let removed = Netlink::open()
            .and_then(|mut netlink| filters::remove_empty_qdisc(&mut netlink, interface.index));
        let failed = |error| Error::new(format!("removing clsact from {}", interface.name), error);
        removed.err().map(failed)
    };
    interfaces.iter().filter_map(remove).collect()
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
