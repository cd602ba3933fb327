//! The addresses that are a pod's own: who calls on its behalf, and what is on no wire.

use std::{
    net::IpAddr,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use tokio::time::Instant;

/// Those that the pod was started with, and those that its interfaces have.
pub(super) struct OwnAddresses {
    first: Vec<IpAddr>,
    found: Mutex<Found>,
}

#[derive(Default)]
struct Found {
    addresses: Vec<IpAddr>,
    asked: Option<Instant>,
}

impl Found {
    fn is_fresh(&self, time: Duration) -> bool {
        self.asked.is_some_and(|asked| asked.elapsed() < time)
    }
}

/// For so long an address that was found counts as the pod's: it may be another's by then.
const KEPT: Duration = Duration::from_secs(1);
/// For so long the pod is not asked again for one that it did not have: whoever is refused may try on.
const REFUSED: Duration = Duration::from_millis(100);

impl OwnAddresses {
    pub(super) fn new(first: Vec<IpAddr>) -> Self {
        Self {
            first: first.into_iter().map(|address| address.to_canonical()).collect(),
            found: Mutex::default(),
        }
    }

    /// Those that the pod was started with.
    pub(super) fn first(&self) -> &[IpAddr] {
        &self.first
    }

    /// Whether `address` is among them, as far as that was asked lately.
    pub(super) fn known_to_have(&self, address: IpAddr) -> bool {
        self.first.contains(&address) || {
            let found = self.found.lock().unwrap_or_else(PoisonError::into_inner);
            found.is_fresh(KEPT) && found.addresses.contains(&address)
        }
    }

    /// Whether `address` is among them. `ask` lists what the interfaces have now, and is asked now and then; when it cannot, nothing is
    /// added to what the pod was started with.
    pub(super) fn have(&self, address: IpAddr, ask: impl FnOnce() -> Result<Vec<IpAddr>, ()>) -> bool {
        if self.first.contains(&address) {
            return true;
        }
        // Held while asking: of many that come at once, one asks.
        let mut found = self.found.lock().unwrap_or_else(PoisonError::into_inner);
        let is_there = found.addresses.contains(&address);
        let fresh = if is_there { KEPT } else { REFUSED };
        if found.is_fresh(fresh) {
            return is_there;
        }
        found.addresses = ask().unwrap_or_default();
        found.asked = Some(Instant::now());
        found.addresses.contains(&address)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn an_address_that_came_later_is_the_pod_s_as_long_as_it_has_it() {
        let ip = |text: &str| text.parse::<IpAddr>().unwrap();
        let own = OwnAddresses::new(vec![ip("::ffff:10.0.0.1")]);
        let never = || unreachable!("it is not asked");
        assert!(own.have(ip("10.0.0.1"), never));
        let (later, other) = (ip("10.0.0.2"), ip("10.0.0.3"));
        assert!(!own.have(later, || Ok(vec![])));
        // Not at once again, whoever asks.
        assert!(!own.have(other, never));
        tokio::time::advance(REFUSED).await;
        assert!(own.have(later, || Ok(vec![later])));
        assert!(own.have(later, never) && own.known_to_have(later));
        tokio::time::advance(REFUSED).await;
        assert!(!own.have(other, || Ok(vec![later])));
        tokio::time::advance(KEPT).await;
        // It has moved on.
        assert!(!own.known_to_have(later));
        assert!(!own.have(later, || Ok(vec![])));
        tokio::time::advance(KEPT).await;
        assert!(!own.have(later, || Err(())));
        assert!(own.have(ip("10.0.0.1"), never));
    }
}
