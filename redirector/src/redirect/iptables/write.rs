//! From the rules that are in a namespace to those that are wanted: what is in place is left alone, anything else is replaced, and
//! what was changed before a failure is changed back.

use std::{
    collections::BTreeMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

use super::{
    rules::{Capture, Chains, Family, Found},
    run::{self, Programs, Tools},
};
use crate::{
    redirect::{Error, rules::Rules},
    sys::netns::Netns,
};

/// Rule sets of which it is remembered how the programs print them. Pods have the same, but for a few.
const MAX_PRINTED: usize = 64;

/// Writes rules, of all families that the programs can reach.
#[derive(Debug, Default)]
pub(super) struct Writer {
    /// How the programs print rule sets: not always as they were written.
    printed: Mutex<BTreeMap<(Family, Chains), Chains>>,
}

impl Writer {
    /// Tries rules in a namespace made for that.
    ///
    /// # Errors
    /// When those of a family can't be written.
    pub(super) fn try_out(tools: &Tools, rules: &Rules) -> Result<Self, Error> {
        let scratch =
            Netns::create().map_err(|error| Error::new("making a namespace to try the rules in", error))?;
        let writer = Self::default();
        writer.bring(tools, &scratch, |family| Capture::from(rules).chains(family))?;
        Ok(writer)
    }

    /// Brings each family to its wanted chains, and tells whether one had others.
    pub(super) fn bring(
        &self,
        tools: &Tools,
        netns: &Netns,
        wanted: impl Fn(Family) -> Chains,
    ) -> Result<bool, Error> {
        self.change(tools, netns, |family, _| wanted(family))
    }

    /// Brings each family to chains made from those that are there, and tells whether one had others.
    pub(super) fn change(
        &self,
        tools: &Tools,
        netns: &Netns,
        wanted: impl Fn(Family, &Found) -> Chains,
    ) -> Result<bool, Error> {
        let before = look(netns, tools.families())?;
        let changes: Vec<_> = before
            .iter()
            .map(|(programs, found)| (*programs, found, wanted(programs.family, found)))
            .filter(|(programs, found, chains)| !self.in_place(programs.family, found, chains))
            .map(|(programs, found, chains)| (programs, found.to(&chains), chains))
            .collect();
        let runs: Vec<_> = changes
            .iter()
            .map(|(programs, input, _)| programs.restore(input))
            .collect();
        let written = run::run(netns, &runs).into_iter().zip(&changes).try_for_each(
            |(result, (programs, _, chains))| result.and_then(|_| self.learn(*programs, netns, chains)),
        );
        match written {
            Ok(()) => Ok(!changes.is_empty()),
            Err(error) => {
                if let Err(undo) = undo(netns, &before) {
                    tracing::error!(error = %undo, netns = %netns.id(), "cannot undo a change of rules that failed");
                }
                Err(error)
            }
        }
    }

    /// Whether chains are in place as they were written.
    fn in_place(&self, family: Family, found: &Found, chains: &Chains) -> bool {
        let printed = || self.printed().get(&(family, chains.clone())).cloned();
        found.is(chains) || printed().is_some_and(|printed| found.is(&printed))
    }

    /// Looks how chains are printed that were just written, unless that is known.
    fn learn(&self, programs: Programs<'_>, netns: &Netns, chains: &Chains) -> Result<(), Error> {
        let family = programs.family;
        let key = (family, chains.clone());
        if self.printed().contains_key(&key) {
            return Ok(());
        }
        let saved = run::run(netns, &[programs.save()]).remove(0)?;
        let found = Found::parse(&saved);
        if !found.has_form_of(chains) {
            return Err(Error::new(
                format!("reading back the {family:?} rules in {}", netns.id()),
                format!("other rules than those that were written: {found:?}"),
            ));
        }
        let mut printed = self.printed();
        if printed.len() >= MAX_PRINTED {
            printed.clear();
        }
        printed.insert(key, found.chains);
        Ok(())
    }

    fn printed(&self) -> MutexGuard<'_, BTreeMap<(Family, Chains), Chains>> {
        self.printed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What of ours is in a namespace, by family.
fn look<'a>(
    netns: &Netns,
    families: impl Iterator<Item = Programs<'a>>,
) -> Result<Vec<(Programs<'a>, Found)>, Error> {
    let families: Vec<_> = families.collect();
    let runs: Vec<_> = families.iter().map(|programs| programs.save()).collect();
    let saved = run::run(netns, &runs);
    families
        .into_iter()
        .zip(saved)
        .map(|(programs, saved)| Ok((programs, Found::parse(&saved?))))
        .collect()
}

fn undo(netns: &Netns, before: &[(Programs<'_>, Found)]) -> Result<(), Error> {
    let now = look(netns, before.iter().map(|(programs, _)| *programs))?;
    for ((programs, now), (_, before)) in now.iter().zip(before) {
        if now != before {
            let input = now.to(&before.chains);
            run::run(netns, &[programs.restore(&input)]).remove(0)?;
        }
    }
    Ok(())
}
