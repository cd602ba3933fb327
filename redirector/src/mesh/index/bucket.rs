//! What shares a key: mostly one, now and then several, and of a service's endpoints many.

use std::{hash::Hash, slice, sync::Arc};

use imbl::{HashMap, hashmap::Entry};

/// In the order of their arrival. Never empty in a map. Cheap to clone.
#[derive(Debug)]
pub(super) enum Bucket<T> {
    One(Arc<T>),
    Several(Arc<Vec<Arc<T>>>),
}

impl<T> Clone for Bucket<T> {
    fn clone(&self) -> Self {
        match self {
            Self::One(one) => Self::One(Arc::clone(one)),
            Self::Several(several) => Self::Several(Arc::clone(several)),
        }
    }
}

impl<T> Default for Bucket<T> {
    fn default() -> Self {
        Self::Several(Arc::default())
    }
}

impl<T> Bucket<T> {
    pub(super) fn as_slice(&self) -> &[Arc<T>] {
        match self {
            Self::One(one) => slice::from_ref(one),
            Self::Several(several) => several,
        }
    }

    pub(super) fn push(&mut self, new: Arc<T>) {
        match self {
            Self::One(one) => *self = Self::Several(Arc::new(vec![Arc::clone(one), new])),
            Self::Several(several) if several.is_empty() => *self = Self::One(new),
            Self::Several(several) => Arc::make_mut(several).push(new),
        }
    }

    /// Puts `new` where `old` is, if it is there.
    fn replace(&mut self, old: &Arc<T>, new: &Arc<T>) -> bool {
        let Some(at) = self.position(old) else {
            return false;
        };
        match self {
            Self::One(one) => *one = Arc::clone(new),
            Self::Several(several) => Arc::make_mut(several)[at] = Arc::clone(new),
        }
        true
    }

    /// Removes `old`, if it is there; an empty bucket may be left.
    pub(super) fn remove(&mut self, old: &Arc<T>) {
        let Some(at) = self.position(old) else { return };
        match self {
            Self::One(_) => *self = Self::default(),
            Self::Several(several) => {
                let several = Arc::make_mut(several);
                several.remove(at);
                if let [one] = &**several {
                    *self = Self::One(Arc::clone(one));
                }
            }
        }
    }

    fn position(&self, wanted: &Arc<T>) -> Option<usize> {
        self.as_slice().iter().position(|one| Arc::ptr_eq(one, wanted))
    }
}

/// A map of buckets.
pub(super) type Buckets<K, T> = HashMap<K, Bucket<T>>;

/// Adds `new` under `key`: in the place of `old`, when that is there.
pub(super) fn put<K: Hash + Eq + Clone, T>(
    buckets: &mut Buckets<K, T>,
    key: K,
    old: Option<&Arc<T>>,
    new: &Arc<T>,
) {
    match buckets.entry(key) {
        Entry::Vacant(vacant) => {
            vacant.insert(Bucket::One(Arc::clone(new)));
        }
        Entry::Occupied(mut occupied) => {
            let bucket = occupied.get_mut();
            if !old.is_some_and(|old| bucket.replace(old, new)) {
                bucket.push(Arc::clone(new));
            }
        }
    }
}

/// Removes `old` from under `key`, if it is there.
pub(super) fn take<K: Hash + Eq + Clone, T>(buckets: &mut Buckets<K, T>, key: &K, old: &Arc<T>) {
    let Some(bucket) = buckets.get_mut(key) else {
        return;
    };
    bucket.remove(old);
    if bucket.as_slice().is_empty() {
        buckets.remove(key);
    }
}
