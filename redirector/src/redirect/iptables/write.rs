//! From the rules that are in a namespace to those that are wanted: what is in place is left alone, anything else is replaced, and
//! what was changed before a failure is changed back.

use std::{
    collections::BTreeMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

use super::{
    rules::{Capture, Chains, Family, Found},
    run::{self, Tools},
};
use crate::{
    redirect::{Error, rules::Rules},
    sys::netns::Netns,
};

/// Rule sets of which it is remembered how the programs print them. Pods have the same, but for a few.
const MAX_PRINTED: usize = 64;

/// Writes rules.
#[derive(Debug)]
pub(super) struct Writer {
    /// Those for which rules can be written here.
    families: Vec<Family>,
    /// How the programs print rule sets: not always as they were written.
    printed: Mutex<BTreeMap<(Family, Chains), Chains>>,
}

impl Writer {
    /// Tries rules in a namespace made for that.
    ///
    /// # Errors
    /// When those for IPv4 can't be written. Without those for IPv6 it goes on, and tells.
    pub(super) fn try_out(tools: &Tools, rules: &Rules) -> Result<Self, Error> {
        let scratch =
            Netns::create().map_err(|error| Error::new("making a namespace to try the rules in", error))?;
        let attempt =
            |writer: &Self| writer.bring(tools, &scratch, |family| Capture::from(rules).chains(family));
        let mut writer = Self {
            families: vec![Family::V4],
            printed: Mutex::default(),
        };
        attempt(&writer)?;
        writer.families = vec![Family::V6];
        writer.families = match attempt(&writer) {
            Ok(_) => vec![Family::V4, Family::V6],
            Err(error) => {
                tracing::warn!(%error, "no rules for IPv6: pods that have IPv6 addresses can't be captured");
                vec![Family::V4]
            }
        };
        Ok(writer)
    }

    /// Whether rules for IPv6 can be written here.
    pub(super) fn v6(&self) -> bool {
        self.families.contains(&Family::V6)
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
        let before = self.look(tools, netns)?;
        let changes: Vec<_> = before
            .iter()
            .map(|(family, found)| (*family, found, wanted(*family, found)))
            .filter(|(family, found, chains)| !self.in_place(*family, found, chains))
            .map(|(family, found, chains)| (family, found.to(&chains), chains))
            .collect();
        let runs: Vec<_> = changes
            .iter()
            .map(|(family, input, _)| tools.restore(*family, input))
            .collect();
        let written =
            run::run(netns, &runs)
                .into_iter()
                .zip(&changes)
                .try_for_each(|(result, (family, _, chains))| {
                    result.and_then(|_| self.learn(tools, netns, *family, chains))
                });
        match written {
            Ok(()) => Ok(!changes.is_empty()),
            Err(error) => {
                if let Err(undo) = self.undo(tools, netns, &before) {
                    tracing::error!(error = %undo, netns = %netns.id(), "cannot undo a change of rules that failed");
                }
                Err(error)
            }
        }
    }

    /// What of ours is in a namespace, by family.
    fn look(&self, tools: &Tools, netns: &Netns) -> Result<Vec<(Family, Found)>, Error> {
        let runs: Vec<_> = self.families.iter().map(|family| tools.save(*family)).collect();
        let saved = run::run(netns, &runs);
        self.families
            .iter()
            .zip(saved)
            .map(|(family, saved)| Ok((*family, Found::parse(&saved?))))
            .collect()
    }

    fn undo(&self, tools: &Tools, netns: &Netns, before: &[(Family, Found)]) -> Result<(), Error> {
        let now = self.look(tools, netns)?;
        for ((family, now), (_, before)) in now.iter().zip(before) {
            if now != before {
                let input = now.to(&before.chains);
                run::run(netns, &[tools.restore(*family, &input)]).remove(0)?;
            }
        }
        Ok(())
    }

    /// Whether chains are in place as they were written.
    fn in_place(&self, family: Family, found: &Found, chains: &Chains) -> bool {
        let printed = || self.printed().get(&(family, chains.clone())).cloned();
        found.is(chains) || printed().is_some_and(|printed| found.is(&printed))
    }

    /// Looks how chains are printed that were just written, unless that is known.
    fn learn(&self, tools: &Tools, netns: &Netns, family: Family, chains: &Chains) -> Result<(), Error> {
        let key = (family, chains.clone());
        if self.printed().contains_key(&key) {
            return Ok(());
        }
        let saved = run::run(netns, &[tools.save(family)]).remove(0)?;
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
