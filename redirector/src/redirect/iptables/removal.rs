//! Removal of a pod's rules by its record, whoever wrote them: for this agent, and for one that runs no more.

use super::{
    ROUTING, all_or,
    records::{Loaded, Record, Records},
    rules::Chains,
    run::{Tools, Variant},
    write::Writer,
};
use crate::{
    mesh::pod::PodUid,
    redirect::Error,
    sys::netns::{Fate, Netns},
};

/// What a removal needs.
pub(super) struct Removal<'a> {
    pub(super) records: &'a Records,
    pub(super) writer: &'a Writer,
    /// The programs that are used now, if there are any.
    pub(super) tools: Option<&'a Tools>,
    /// Whether a namespace that can't be found is gone: all that there are can be seen.
    pub(super) sees_all: bool,
}

impl Removal<'_> {
    /// Removes all there is of a pod, and its record then: in `given` if that is the namespace on record, or else in the one on
    /// record, if that is still there.
    pub(super) fn of_pod(&self, uid: &PodUid, given: Option<&Netns>) -> Result<(), Vec<Error>> {
        let mut errors = match self.rules_of(uid, given) {
            Ok(errors) => errors,
            Err(error) => vec![error],
        };
        // With a record that is left, the next agent tries again.
        if errors.is_empty() {
            errors.extend(self.records.remove(uid).err());
        }
        all_or(errors)
    }

    fn rules_of(&self, uid: &PodUid, given: Option<&Netns>) -> Result<Vec<Error>, Error> {
        let record = match (self.records.load(uid)?, given) {
            (Loaded::Nothing, _) => return Ok(Vec::new()),
            (Loaded::Record(record), _) => record,
            (Loaded::Unknown(error), Some(netns)) => Record::unknown(uid, netns, &error)?,
            // Nobody says which namespace it was.
            (Loaded::Unknown(error), None) => return Err(error),
        };
        if let Some(netns) = given
            && record.is_of(netns)?
        {
            return Ok(self.clear(netns, &record));
        }
        let ino = record.netns_ino;
        let failed = |error| Error::new(format!("looking for the namespace net:[{ino}] of {uid}"), error);
        match record.place().fate(self.sees_all).map_err(failed)? {
            // Before Linux 5.14 there are no cookies: another pod's record with this namespace means that the number has come back.
            Fate::There(found) if !self.records.others_have(uid, ino)? => Ok(self.clear(&found, &record)),
            Fate::There(_) | Fate::Gone => Ok(Vec::new()),
            Fate::Unseen => Err(Error::new(
                format!("looking for the namespace net:[{ino}] of {uid}"),
                format!(
                    "no process here and no name in /run/netns has it, but others may: run this in the node's PID namespace with \
                     CAP_SYS_PTRACE, or remove {} once the pod is gone",
                    self.records.path(uid).display()
                ),
            )),
        }
    }

    /// Removes all of ours from a namespace.
    pub(super) fn clear(&self, netns: &Netns, record: &Record) -> Vec<Error> {
        let mut errors = Vec::new();
        match self.tools_of(record) {
            Ok(tools) => errors.extend(
                tools
                    .iter()
                    .filter_map(|tools| self.clear_rules(netns, tools).err()),
            ),
            Err(error) => errors.push(error),
        }
        let inside = netns.run(|| {
            let mut errors = ROUTING.remove();
            errors.extend(ROUTING.restore_sysctls(record.changed_sysctls));
            errors
        });
        match inside {
            Ok(more) => errors.extend(more),
            Err(error) => errors.push(Error::new(format!("entering {}", netns.id()), error)),
        }
        errors
    }

    /// Removes our rules, of the kind that these programs write.
    pub(super) fn clear_rules(&self, netns: &Netns, tools: &Tools) -> Result<(), Error> {
        self.writer.bring(tools, netns, |_| Chains::new()).map(drop)
    }

    /// The programs for the rules that a pod has, or may have. An earlier agent may have used others than are used now.
    pub(super) fn tools_of(&self, record: &Record) -> Result<Vec<Tools>, Error> {
        let find = |variant: Variant| match self.tools {
            Some(tools) if tools.variant == variant => Ok(tools.clone()),
            _ => Tools::find(variant.into()),
        };
        let found = record.variants().into_iter().map(find).collect();
        all_or_some(record.variant.is_some(), found)
    }
}

/// What was found: all of it, or if it need not all be there, some of it.
fn all_or_some<T>(all: bool, found: Vec<Result<T, Error>>) -> Result<Vec<T>, Error> {
    let (mut there, mut missing) = (Vec::new(), None);
    for found in found {
        match found {
            Ok(found) => there.push(found),
            Err(error) => missing = Some(error),
        }
    }
    match missing {
        Some(error) if all || there.is_empty() => Err(error),
        _ => Ok(there),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_namespace_that_is_not_found_is_gone_only_to_who_sees_all() {
        let directory = tempfile::tempdir().unwrap();
        let records = Records::open(directory.path()).unwrap();
        let uid: PodUid = "a-pod".parse().unwrap();
        // No namespace has the number 1.
        let text = r#"{"netnsIno":1,"netnsCookie":7,"variant":"nft","changedSysctls":0}"#;
        fs::write(records.path(&uid), text).unwrap();
        let writer = Writer::default();
        let remove = |sees_all| {
            let removal = Removal {
                records: &records,
                writer: &writer,
                tools: None,
                sees_all,
            };
            removal.of_pod(&uid, None)
        };
        let errors = remove(false).unwrap_err();
        assert!(errors[0].to_string().contains("net:[1]"), "{errors:?}");
        assert_eq!(records.uids().unwrap(), std::slice::from_ref(&uid));
        remove(true).unwrap();
        assert_eq!(records.uids().unwrap(), []);
        // There need be none.
        remove(false).unwrap();
    }

    #[test]
    fn rules_of_which_no_kind_can_be_looked_for_are_not_gone() {
        for (all, found, expected) in [
            (true, "a", Some("a")),
            (true, "-", None),
            (false, "ab", Some("ab")),
            (false, "-b", Some("b")),
            (false, "a-", Some("a")),
            (false, "--", None),
        ] {
            let each = |c| match c {
                '-' => Err(Error::new("looking for a program", "it is missing")),
                c => Ok(c),
            };
            let found = all_or_some(all, found.chars().map(each).collect());
            assert_eq!(found.ok().map(String::from_iter).as_deref(), expected);
        }
    }

    #[test]
    fn a_record_that_cannot_be_read_stays() {
        let directory = tempfile::tempdir().unwrap();
        let records = Records::open(directory.path()).unwrap();
        let uid: PodUid = "a-pod".parse().unwrap();
        fs::write(records.path(&uid), "{").unwrap();
        let removal = Removal {
            records: &records,
            writer: &Writer::default(),
            tools: None,
            sees_all: true,
        };
        let errors = removal.of_pod(&uid, None).unwrap_err();
        let path = records.path(&uid).display().to_string();
        assert!(errors[0].to_string().contains(&path), "{errors:?}");
        assert_eq!(records.uids().unwrap(), [uid]);
    }
}
