//! The two sets of a pod's rules in the trie `RULES`: one is in force, and the other was so before, or is being made.

use aya::maps::MapError;
use redirector_common::{
    maps::{RULE_KEY_PREFIX, RuleKey},
    rules::Match,
};

use super::trie::{Compiled, Prefix};
use crate::redirect::maps::RuleMap;

/// The trie, as far as a change of rules needs it.
pub(super) trait Trie {
    /// Says something about the first `length` bits of a key.
    fn insert(&mut self, length: u32, key: RuleKey, what: Match) -> Result<(), MapError>;
    /// Removes an entry; one that is not there is fine.
    fn remove(&mut self, length: u32, key: RuleKey) -> Result<(), MapError>;
}

impl Trie for RuleMap {
    fn insert(&mut self, length: u32, key: RuleKey, what: Match) -> Result<(), MapError> {
        self.insert(length, key, what)
    }

    fn remove(&mut self, length: u32, key: RuleKey) -> Result<(), MapError> {
        self.remove(length, key)
    }
}

/// What a slot has in the trie, of both generations.
#[derive(Debug, Default)]
pub(super) struct Generations {
    keys: Vec<(u32, RuleKey)>,
}

impl Generations {
    /// How many entries there are.
    pub(super) fn len(&self) -> usize {
        self.keys.len()
    }

    /// Notes an entry that is there.
    pub(super) fn note(&mut self, length: u32, key: RuleKey) {
        self.keys.push((length, key));
    }

    /// Makes a generation that is not in force have exactly the `wanted` entries, whatever it had: the rules before the present ones,
    /// or what a change that failed has left.
    pub(super) fn renew(
        &mut self,
        slot: u32,
        generation: u8,
        wanted: &Compiled,
        trie: &mut impl Trie,
    ) -> Result<(), MapError> {
        while let Some(at) = self.keys.iter().position(|(_, key)| key.generation == generation) {
            let (length, key) = self.keys[at];
            trie.remove(length, key)?;
            self.keys.swap_remove(at);
        }
        for (prefix, what) in &wanted.entries {
            let (length, key) = rule_key(slot, generation, prefix);
            self.note(length, key);
            trie.insert(length, key, *what)?;
        }
        Ok(())
    }

    /// Removes all. Goes on after a failure and returns every one.
    pub(super) fn remove(self, trie: &mut impl Trie) -> Vec<MapError> {
        let keys = self.keys.into_iter();
        keys.filter_map(|(length, key)| trie.remove(length, key).err())
            .collect()
    }
}

fn rule_key(slot: u32, generation: u8, prefix: &Prefix) -> (u32, RuleKey) {
    let key = RuleKey {
        slot,
        subject: prefix.subject,
        generation,
        zero: [0; 2],
        value: prefix.value,
    };
    (RULE_KEY_PREFIX + prefix.length, key)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::redirect::rules::{Lists, Rules};

    /// One that has room for some more changes, and then fails.
    struct Failing {
        entries: BTreeMap<(u8, [u8; 16], u32), Match>,
        changes_left: usize,
    }

    impl Failing {
        fn change(&mut self) -> Result<(), MapError> {
            self.changes_left = self
                .changes_left
                .checked_sub(1)
                .ok_or(MapError::ElementNotFound)?;
            Ok(())
        }

        fn of(&self, generation: u8) -> Vec<[u8; 16]> {
            let keys = self.entries.keys();
            keys.filter(|key| key.0 == generation).map(|key| key.1).collect()
        }
    }

    impl Trie for Failing {
        fn insert(&mut self, length: u32, key: RuleKey, what: Match) -> Result<(), MapError> {
            self.change()?;
            self.entries.insert((key.generation, key.value, length), what);
            Ok(())
        }

        fn remove(&mut self, length: u32, key: RuleKey) -> Result<(), MapError> {
            self.change()?;
            self.entries.remove(&(key.generation, key.value, length));
            Ok(())
        }
    }

    fn ports(text: &str) -> Compiled {
        let lists = Lists {
            not_ports: text.parse().unwrap(),
            ..Lists::default()
        };
        Compiled::of(&Rules {
            inbound: lists,
            ..Rules::default()
        })
    }

    fn values(rules: &Compiled) -> Vec<[u8; 16]> {
        rules.entries.keys().map(|prefix| prefix.value).collect()
    }

    #[test]
    fn a_change_leaves_the_rules_before_it_and_none_that_are_older() {
        let mut trie = Failing {
            entries: BTreeMap::new(),
            changes_left: usize::MAX,
        };
        let mut held = Generations::default();
        let [first, second, third] = ["80,81", "81,82,83", "90"].map(ports);
        for (generation, rules) in [(0, &first), (1, &second), (0, &third)] {
            held.renew(7, generation, rules, &mut trie).unwrap();
        }
        assert_eq!((trie.of(0), trie.of(1)), (values(&third), values(&second)));
        assert!(held.remove(&mut trie).is_empty());
        assert!(trie.entries.is_empty());
    }

    #[test]
    fn what_a_failed_change_left_is_no_rule_later() {
        let (old, failing, wanted) = (ports("80"), ports("1000-2000"), ports("90,1000"));
        for changes in 0..=failing.entries.len() {
            let mut trie = Failing {
                entries: BTreeMap::new(),
                changes_left: usize::MAX,
            };
            let mut held = Generations::default();
            held.renew(7, 0, &old, &mut trie).unwrap();
            held.renew(7, 1, &ports("70"), &mut trie).unwrap();
            trie.changes_left = changes;
            held.renew(7, 1, &failing, &mut trie).unwrap_err();
            trie.changes_left = usize::MAX;
            held.renew(7, 1, &wanted, &mut trie).unwrap();
            assert_eq!(
                (trie.of(0), trie.of(1)),
                (values(&old), values(&wanted)),
                "{changes}"
            );
        }
    }
}
