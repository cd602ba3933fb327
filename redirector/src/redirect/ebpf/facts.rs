//! What is to be known of an instance, of whatever build, to take it over, to replace it or to remove it: the map `FACTS`.

use redirector_common::maps::{self as layout, FACT_CLSACT, FACT_DNS_CAPTURE, Facts};

use super::{
    open_map,
    pins::{Instance, Pins},
};
use crate::{
    redirect::{Error, maps::FactsMap},
    sys::netns::Place,
};

/// The first facts about what is made in a place.
pub(super) fn first(place: Place, flags: u32) -> Facts {
    Facts {
        version: Facts::VERSION,
        flags,
        netns_ino: place.ino,
        netns_cookie: place.cookie.unwrap_or(0),
        ..bytemuck::Zeroable::zeroed()
    }
}

/// Where the facts say that an instance is.
pub(super) fn place(facts: &Facts) -> Place {
    Place {
        ino: facts.netns_ino,
        cookie: (facts.netns_cookie != 0).then_some(facts.netns_cookie),
    }
}

/// What is kept of a slot that is free again.
pub(super) const FREED: Facts = Facts {
    version: Facts::VERSION,
    flags: 0,
    netns_ino: 0,
    netns_cookie: 0,
    changed_sysctls: 0,
    zero: 0,
    reserved: [0; 4],
};

/// An instance and its facts; `None` if they can't be read.
pub(super) type Found = (Instance, Option<Facts>);

/// An instance with its facts.
pub(super) fn found(instance: Instance) -> Found {
    let map = open(&instance).ok();
    let facts = map.and_then(|map| look_up(&map, &instance));
    (instance, facts)
}

fn look_up(map: &FactsMap, instance: &Instance) -> Option<Facts> {
    let facts = map.read(instance.slot).ok()??;
    (facts.netns_ino != 0).then_some(facts)
}

/// All instances, of all pods and builds.
pub(super) fn all(pins: &Pins) -> Result<Vec<Found>, Error> {
    let mut all = Vec::new();
    for build in pins.builds()? {
        let map = open_map(&build.maps(), layout::FACTS, FactsMap::new).ok();
        for instance in build.instances()? {
            let facts = map.as_ref().and_then(|map| look_up(map, &instance));
            all.push((instance, facts));
        }
    }
    Ok(all)
}

/// Replaces what is known of an instance.
pub(super) fn write(instance: &Instance, facts: Facts) -> Result<(), Error> {
    open(instance)?
        .write(instance.slot, facts)
        .map_err(|error| Error::new(format!("writing what is known of {}", instance.uid), error))
}

fn open(instance: &Instance) -> Result<FactsMap, Error> {
    open_map(&instance.build.maps(), layout::FACTS, FactsMap::new)
}

/// What is known of several instances that serve one namespace, one after the other; `None` of none. What can't be read is taken for
/// the worst: filters may hang there, and the pod may rely on its DNS being captured; which sysctls were changed nobody knows.
pub(super) fn together(facts: impl IntoIterator<Item = Option<Facts>>) -> Option<Facts> {
    facts
        .into_iter()
        .map(|facts| {
            facts.unwrap_or(Facts {
                flags: FACT_CLSACT | FACT_DNS_CAPTURE,
                ..FREED
            })
        })
        .reduce(|all, one| Facts {
            flags: all.flags | one.flags,
            changed_sysctls: all.changed_sysctls | one.changed_sysctls,
            ..one
        })
}

#[cfg(test)]
mod tests {
    use redirector_common::maps::FACT_ADDED_CLSACT;

    use super::*;

    #[test]
    fn a_place_is_read_as_it_was_written() {
        for cookie in [Some(1), None] {
            let written = Place { ino: 7, cookie };
            assert_eq!(place(&first(written, 0)), written);
        }
    }

    #[test]
    fn what_can_not_be_read_is_taken_for_the_worst() {
        assert_eq!(together([]), None);
        let read = Facts {
            flags: FACT_ADDED_CLSACT,
            changed_sysctls: 5,
            ..FREED
        };
        let all = together([Some(read), None]).unwrap();
        assert!(all.has(FACT_ADDED_CLSACT | FACT_CLSACT | FACT_DNS_CAPTURE));
        assert_eq!(all.changed_sysctls, 5);
        assert_eq!(together([Some(read)]), Some(read));
    }
}
