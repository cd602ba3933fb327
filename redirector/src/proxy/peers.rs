//! What one peer may have of a pod's proxy at a time, so that it leaves something to the others.
//!
//! `inbound` and `passthrough` ask for each connection, by the address that it comes from, and `inbound` for each request, by the
//! identity that TLS has proven. Whoever is over a bound is refused at once; nobody waits for another.

use std::{
    collections::HashMap,
    hash::Hash,
    net::{IpAddr, SocketAddr},
    sync::{Arc, Mutex, PoisonError, Weak},
    time::Duration,
};

use tokio::{net::TcpStream, sync::Semaphore, time::Instant};

use super::metrics::{Metrics, Reason};
use crate::mesh::{pod::PodUid, spiffe::SpiffeId};

/// Bounds of what peers have of one pod. Far above what a peer has that works: a ztunnel has a few tunnels of a hundred streams,
/// and shakes hands for one at a time; a gateway in front of a pod may have thousands of streams, and, where it passes on the
/// inner tunnel of another network, as many tunnels. And below what the pod has in all
/// ([`max_connections`](super::Config::max_connections)): a quarter is left to others.
#[derive(Debug, Clone, Copy)]
pub struct PeerConfig {
    /// TLS handshakes under way on 15008, from everywhere. Each holds some 30 KiB and a file for the handshake's deadline at most.
    pub max_handshakes: usize,
    /// Those from one address.
    pub max_handshakes_per_address: usize,
    /// Connections from one address to 15006, and as many to 15008.
    pub max_connections_per_address: usize,
    /// Requests of one identity that are open on 15008, whatever tunnels and addresses they come by.
    pub max_streams_per_identity: usize,
}

impl PeerConfig {
    /// Of a pod that may have so many connections: a quarter of them for handshakes, of these a quarter for one address; three
    /// quarters for one peer. At least one of each.
    pub fn of(max_connections: usize) -> Self {
        let part = |quarters: usize, of: usize| (of / 4 * quarters).max(1);
        let max_handshakes = part(1, max_connections);
        Self {
            max_handshakes,
            max_handshakes_per_address: part(1, max_handshakes),
            max_connections_per_address: part(3, max_connections),
            max_streams_per_identity: part(3, max_connections),
        }
    }
}

/// What is left to an address.
#[derive(Debug)]
pub(super) struct Address {
    /// Handshakes on 15008.
    pub(super) handshakes: Semaphore,
    /// Connections to 15008.
    pub(super) tunnels: Semaphore,
    /// Connections to 15006.
    pub(super) plain: Semaphore,
}

/// What is left to the peers of a pod.
pub(super) struct Peers {
    config: PeerConfig,
    /// Handshakes on 15008.
    pub(super) handshakes: Semaphore,
    addresses: Shares<IpAddr, Address>,
    identities: Shares<SpiffeId, Semaphore>,
    told: Mutex<Told>,
}

impl Peers {
    pub(super) fn new(config: PeerConfig) -> Self {
        Self {
            config,
            handshakes: Semaphore::new(config.max_handshakes),
            addresses: Shares::default(),
            identities: Shares::default(),
            told: Mutex::default(),
        }
    }

    /// What is left to those at `address`; to be held as long as something is taken of it.
    pub(super) fn at(&self, address: IpAddr) -> Arc<Address> {
        let PeerConfig {
            max_handshakes_per_address,
            max_connections_per_address,
            ..
        } = self.config;
        self.addresses.of(&address, || Address {
            handshakes: Semaphore::new(max_handshakes_per_address),
            tunnels: Semaphore::new(max_connections_per_address),
            plain: Semaphore::new(max_connections_per_address),
        })
    }

    /// How many more requests `identity` may have open; to be held as long as it has some.
    pub(super) fn streams_of(&self, identity: &SpiffeId) -> Arc<Semaphore> {
        let max = self.config.max_streams_per_identity;
        self.identities.of(identity, || Semaphore::new(max))
    }

    /// Resets a connection that is one too many. It is counted; a peer that tries on must not fill the log, so that has a line now
    /// and then.
    pub(super) fn refuse(
        &self,
        uid: &PodUid,
        metrics: &Metrics,
        reason: Reason,
        connection: &TcpStream,
        peer: SocketAddr,
    ) {
        metrics.refused(reason);
        // Cannot fail on a TCP socket.
        let _ = connection.set_zero_linger();
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(untold) = told.again(Instant::now()) {
            tracing::warn!(
                %uid, src.addr = %peer, ?reason, untold,
                "connection refused: the peer, or all peers together, have as many as they may"
            );
        }
    }
}

/// What has been said of refusals.
#[derive(Debug, Default)]
struct Told {
    last: Option<Instant>,
    untold: u64,
}

impl Told {
    /// How many were not told since the last that was; `None` if this is too soon to tell.
    fn again(&mut self, now: Instant) -> Option<u64> {
        const EVERY: Duration = Duration::from_secs(5);
        if self.last.is_some_and(|last| now - last < EVERY) {
            self.untold += 1;
            return None;
        }
        self.last = Some(now);
        Some(std::mem::take(&mut self.untold))
    }
}

/// A value for each key that somebody holds.
struct Shares<K, V>(Mutex<Held<K, V>>);

struct Held<K, V> {
    values: HashMap<K, Weak<V>>,
    /// How many keys there may be before those that nobody holds are looked for.
    sweep_at: usize,
}

impl<K, V> Default for Shares<K, V> {
    fn default() -> Self {
        Self(Mutex::new(Held {
            values: HashMap::new(),
            sweep_at: Self::SWEEP_FIRST,
        }))
    }
}

impl<K, V> Shares<K, V> {
    const SWEEP_FIRST: usize = 64;
}

impl<K: Hash + Eq + Clone, V> Shares<K, V> {
    /// The value that others hold for `key`, or a new one.
    fn of(&self, key: &K, make: impl FnOnce() -> V) -> Arc<V> {
        let mut held = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(value) = held.values.get(key).and_then(Weak::upgrade) {
            return value;
        }
        // Twice what is alive: a sweep is paid for by as many new keys.
        if held.values.len() >= held.sweep_at {
            held.values.retain(|_, value| value.strong_count() > 0);
            held.sweep_at = Self::SWEEP_FIRST.max(2 * held.values.len());
        }
        let value = Arc::new(make());
        held.values.insert(key.clone(), Arc::downgrade(&value));
        value
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn few() -> Peers {
        Peers::new(PeerConfig {
            max_handshakes: 3,
            max_handshakes_per_address: 2,
            max_connections_per_address: 2,
            max_streams_per_identity: 2,
        })
    }

    fn ip(last: u32) -> IpAddr {
        IpAddr::from((0x0a00_0000 + last).to_be_bytes())
    }

    #[test]
    fn the_defaults_leave_something_to_others() {
        let (peers, all) = (
            PeerConfig::of(16_384),
            super::super::Config::default().max_connections,
        );
        assert!(peers.max_handshakes_per_address < peers.max_handshakes);
        assert!(peers.max_handshakes < all);
        for per_peer in [peers.max_connections_per_address, peers.max_streams_per_identity] {
            // Ten thousand connections of one gateway are nothing special.
            assert!((10_000..all).contains(&per_peer));
        }
    }

    #[test]
    fn a_peer_over_its_bound_is_refused_and_others_are_not() {
        let peers = few();
        let (greedy, modest) = (peers.at(ip(1)), peers.at(ip(2)));
        let taken = [greedy.tunnels.try_acquire(), greedy.tunnels.try_acquire()];
        assert!(taken.iter().all(Result::is_ok));
        // Whoever asks again, for another connection from there, has the same share.
        assert!(peers.at(ip(1)).tunnels.try_acquire().is_err());
        assert!(greedy.plain.try_acquire().is_ok(), "each port by itself");
        assert!(modest.tunnels.try_acquire().is_ok());
        drop(taken);
        assert!(peers.at(ip(1)).tunnels.try_acquire().is_ok());
    }

    #[test]
    fn an_identity_has_one_share_by_whatever_address() {
        let peers = few();
        let [web, cart] = ["web", "cart"].map(|account| SpiffeId::new("td", "shop", account).unwrap());
        let tunnels = [peers.streams_of(&web), peers.streams_of(&web)];
        let streams = tunnels.each_ref().map(|streams| streams.try_acquire());
        assert!(streams.iter().all(Result::is_ok));
        assert!(peers.streams_of(&web).try_acquire().is_err());
        assert!(peers.streams_of(&cart).try_acquire().is_ok());
    }

    #[test]
    fn peers_that_are_gone_are_forgotten() {
        let peers = few();
        let stays = peers.at(ip(0));
        let _taken = [stays.tunnels.try_acquire(), stays.tunnels.try_acquire()];
        for last in 1..10_000 {
            drop(peers.at(ip(last)));
        }
        assert!(peers.addresses.0.lock().unwrap().values.len() <= 64);
        assert!(
            peers.at(ip(0)).tunnels.try_acquire().is_err(),
            "its share is the same"
        );
    }

    #[test]
    fn refusals_are_told_now_and_then_with_how_many_there_were() {
        let (mut told, start) = (Told::default(), Instant::now());
        let at = |millis| start + Duration::from_millis(millis);
        let answers: Vec<_> = [0, 1, 4999, 5000, 5001, 20_000]
            .into_iter()
            .map(|millis| told.again(at(millis)))
            .collect();
        assert_eq!(answers, [Some(0), None, None, Some(2), None, Some(1)]);
    }
}
