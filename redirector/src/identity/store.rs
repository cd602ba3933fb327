//! The current certificate of each identity in use, and the TLS configurations made from it.
//!
//! `pods` holds an identity for each pod; `proxy` asks for configurations, for each connection anew, so that a new
//! certificate is used by the next one. Connections that are open keep the one they began with.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    time::{Duration, SystemTime},
};

use futures_util::StreamExt;
use rustls::{ClientConfig, ServerConfig};
use rustls_pki_types::CertificateDer;
use tokio::sync::watch;
use tokio_util::task::AbortOnDropHandle;

use super::{
    CertSource, Error, Svid,
    crl_file::RevocationsView,
    states::{CertificateView, IdentityState},
    tls::{Credentials, Proof},
    trust::PeerRules,
};
use crate::{mesh::spiffe::SpiffeId, telemetry::Chain};

/// How long a connection waits for an identity's first certificate. ztunnel's time for a workload to appear.
const FIRST_CERTIFICATE_DEADLINE: Duration = Duration::from_secs(5);

/// First and longest wait before a source whose stream has ended is asked again.
const RESTART_BACKOFF: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));

/// The certificates in use on this node.
pub struct Store {
    source: Arc<dyn CertSource>,
    rules: PeerRules,
    /// Wall time; tests have their own.
    clock: Clock,
    entries: Mutex<HashMap<SpiffeId, Weak<Entry>>>,
}

type Clock = Arc<dyn Fn() -> SystemTime + Send + Sync>;

impl Store {
    /// A store fed by `source`, for pods whose peers are under `rules`.
    pub fn new(source: Arc<dyn CertSource>, rules: PeerRules) -> Arc<Self> {
        Self::with_clock(source, rules, Arc::new(SystemTime::now))
    }

    fn with_clock(source: Arc<dyn CertSource>, rules: PeerRules, clock: Clock) -> Arc<Self> {
        Arc::new(Self {
            source,
            rules,
            clock,
            entries: Mutex::default(),
        })
    }

    /// Begins to keep a certificate for `id`, for as long as the returned guard lives; several guards of one identity
    /// share one certificate. Does not wait for it: the first connection does. Must be called within a tokio runtime.
    pub fn hold(self: &Arc<Self>, id: &SpiffeId) -> Held {
        let mut entries = self.entries();
        if let Some(entry) = entries.get(id).and_then(Weak::upgrade) {
            return Held { entry };
        }
        let (state, receiver) = watch::channel(State::default());
        let keeper = Keeper {
            id: id.clone(),
            source: Arc::clone(&self.source),
            rules: self.rules.clone(),
            clock: Arc::clone(&self.clock),
            state,
        };
        let entry = Arc::new(Entry {
            domains: self.rules.aliases.names_of(id.trust_domain()),
            id: id.clone(),
            store: Arc::downgrade(self),
            clock: Arc::clone(&self.clock),
            state: receiver,
            _keeper: AbortOnDropHandle::new(tokio::spawn(keeper.run())),
        });
        entries.insert(id.clone(), Arc::downgrade(&entry));
        Held { entry }
    }

    /// What is known of each identity, in their order.
    pub fn states(&self) -> Vec<IdentityState> {
        let entries: Vec<_> = self.entries().values().filter_map(Weak::upgrade).collect();
        let mut states: Vec<_> = entries.iter().map(|entry| entry.shown()).collect();
        states.sort_by(|one, other| one.identity.cmp(&other.identity));
        states
    }

    /// For how many seconds each identity's certificate is still good, in their order: below zero it is over, and `None` is of one that
    /// never had any.
    pub fn seconds_left(&self) -> Vec<(String, Option<i64>)> {
        let entries: Vec<_> = self.entries().values().filter_map(Weak::upgrade).collect();
        let mut left: Vec<_> = entries
            .iter()
            .map(|entry| (entry.id.to_string(), entry.seconds_left()))
            .collect();
        left.sort();
        left
    }

    /// The revocation lists that peers are looked for in, if there are to be any.
    pub fn revocations(&self) -> Option<RevocationsView> {
        self.rules.revocations.view()
    }

    fn entries(&self) -> MutexGuard<'_, HashMap<SpiffeId, Weak<Entry>>> {
        // Each change of the map is one call: a panic elsewhere leaves it whole.
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An identity that is kept supplied with a certificate.
pub struct Held {
    entry: Arc<Entry>,
}

impl Held {
    /// The identity.
    pub fn id(&self) -> &SpiffeId {
        &self.entry.id
    }

    /// TLS configuration for the server side: mutual TLS, TLS 1.3, ALPN h2; asks the client for a SPIFFE identity of the
    /// own trust domain. Waits for the first certificate up to a deadline.
    ///
    /// # Errors
    /// When there is no certificate that is still valid; the cause is the source's last failure, if there was one.
    pub async fn server_config(&self) -> Result<Arc<ServerConfig>, Error> {
        Ok(Arc::clone(&self.entry.current().await?.server))
    }

    /// TLS configuration for the client side: the server must show one of `expected`. Waits like `server_config`.
    ///
    /// # Errors
    /// As for `server_config`.
    pub async fn client_config(&self, expected: &[SpiffeId]) -> Result<Arc<ClientConfig>, Error> {
        let current = self.entry.current().await?;
        let config = current
            .credentials
            .client_config(expected)
            .map_err(|error| Error::new(format!("TLS client configuration of {}", self.id()), error))?;
        Ok(Arc::new(config))
    }
}

impl Held {
    /// All names of its trust domain; none when it has but one.
    pub fn domains(&self) -> &Arc<[Arc<str>]> {
        &self.entry.domains
    }

    /// For a connection with a peer that has shown `chain` in a handshake just now.
    pub fn proof(&self, chain: &[CertificateDer<'_>]) -> Proof {
        let state = self.entry.state.borrow();
        let current = state.current.as_ref();
        current.map_or_else(Proof::default, |current| current.credentials.proof(chain))
    }

    /// The certificate in use, if there is one that is still valid. Does not wait.
    pub fn current(&self) -> Option<Arc<Credentials>> {
        let state = self.entry.state.borrow();
        let current = state.current.as_ref();
        let valid = current.filter(|current| !self.entry.expired(current));
        valid.map(|current| Arc::clone(&current.credentials))
    }
}

/// What the guards of one identity share.
struct Entry {
    id: SpiffeId,
    domains: Arc<[Arc<str>]>,
    store: Weak<Store>,
    clock: Clock,
    state: watch::Receiver<State>,
    _keeper: AbortOnDropHandle<()>,
}

impl Entry {
    async fn current(&self) -> Result<Arc<Current>, Error> {
        let mut state = self.state.clone();
        let valid = |state: &State| {
            state
                .current
                .as_ref()
                .is_some_and(|current| !self.expired(current))
        };
        // One that is over and cannot be renewed is no matter of moments, as the first one is; the next try is near in any case.
        let is_lost = |state: &State| state.current.is_some() && state.failure.is_some();
        let settled = |state: &State| valid(state) || is_lost(state);
        let waited = tokio::time::timeout(FIRST_CERTIFICATE_DEADLINE, state.wait_for(settled)).await;
        if let Ok(Ok(state)) = waited
            && valid(&state)
            && let Some(current) = &state.current
        {
            return Ok(Arc::clone(current));
        }
        let state = self.state.borrow().clone();
        let cause = state
            .failure
            .unwrap_or_else(|| Arc::new(Unanswered(FIRST_CERTIFICATE_DEADLINE)));
        let operation = match state.current {
            Some(current) => {
                let at = time::OffsetDateTime::from(current.not_after);
                format!(
                    "certificate of {} has expired at {at}; getting a new one",
                    self.id
                )
            }
            None => format!("first certificate of {}", self.id),
        };
        Err(Error {
            operation,
            source: cause,
        })
    }

    fn shown(&self) -> IdentityState {
        let state = self.state.borrow().clone();
        let is_over = state
            .current
            .as_ref()
            .is_some_and(|current| self.expired(current));
        let failure = state.failure.as_ref().map(|error| Chain(&**error).to_string());
        let failure = failure.or(is_over.then(|| "the certificate has expired".to_owned()));
        let valid = state.current.filter(|_| !is_over);
        let is_valid = valid.is_some();
        let chains = valid.map(|current| (current.credentials.chain().to_vec(), current.roots.clone()));
        let (chain, roots) = chains.unwrap_or_default();
        IdentityState {
            identity: self.id.to_string(),
            state: match (&failure, is_valid) {
                (_, true) => "Available".to_owned(),
                (Some(failure), false) => format!("Unavailable: {failure}"),
                (None, false) => "Initializing".to_owned(),
            },
            renewal_error: failure.filter(|_| is_valid),
            cert_chain: CertificateView::all(&chain),
            root_certs: CertificateView::all(&roots),
        }
    }

    fn seconds_left(&self) -> Option<i64> {
        let state = self.state.borrow();
        let end = time::OffsetDateTime::from(state.current.as_ref()?.not_after);
        Some((end - time::OffsetDateTime::from((self.clock)())).whole_seconds())
    }

    fn expired(&self, current: &Current) -> bool {
        (self.clock)() >= current.not_after
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        let Some(store) = self.store.upgrade() else { return };
        let mut entries = store.entries();
        // Not when the identity is held again by now.
        if entries
            .get(&self.id)
            .is_some_and(|entry| entry.strong_count() == 0)
        {
            entries.remove(&self.id);
        }
    }
}

/// What is known of an identity's certificate.
#[derive(Clone, Default)]
struct State {
    current: Option<Arc<Current>>,
    /// Why there is no newer one; `None` after a success.
    failure: Option<Cause>,
}

type Cause = Arc<dyn std::error::Error + Send + Sync>;

/// A certificate in use.
struct Current {
    credentials: Arc<Credentials>,
    server: Arc<ServerConfig>,
    roots: Vec<CertificateDer<'static>>,
    not_before: SystemTime,
    not_after: SystemTime,
}

/// Takes the certificates of one identity from the source. Runs until it is aborted.
struct Keeper {
    id: SpiffeId,
    source: Arc<dyn CertSource>,
    rules: PeerRules,
    clock: Clock,
    state: watch::Sender<State>,
}

impl Keeper {
    async fn run(self) {
        let (first, longest) = RESTART_BACKOFF;
        let mut backoff = first;
        loop {
            let mut svids = self.source.svids(&self.id);
            while let Some(svid) = svids.next().await {
                let taken: Result<Current, Cause> = match svid {
                    Ok(svid) => self.check(&svid).map_err(|error| Arc::new(error) as Cause),
                    Err(error) => Err(Arc::new(error)),
                };
                match taken {
                    Ok(current) => {
                        backoff = first;
                        self.wait_for_begin(&current).await;
                        self.replace(current);
                    }
                    Err(error) => self.keep(error),
                }
            }
            tracing::warn!(id = %self.id, retry = ?backoff, "the source of certificates has ended");
            tokio::time::sleep(backoff).await;
            backoff = (backoff * 2).min(longest);
        }
    }

    /// Whether it may replace the one before: a bad answer never does.
    fn check(&self, svid: &Svid) -> Result<Current, Refused> {
        if svid.id != self.id {
            return Err(Refused::OtherIdentity(svid.id.clone()));
        }
        if (self.clock)() >= svid.not_after {
            return Err(Refused::Expired(svid.not_after.into()));
        }
        let credentials = Credentials::under(svid, &self.rules)?;
        let server = Arc::new(credentials.server_config()?);
        Ok(Current {
            credentials: Arc::new(credentials),
            server,
            roots: svid.roots.clone(),
            not_before: svid.not_before,
            not_after: svid.not_after,
        })
    }

    /// One that begins later, since its maker's clock is ahead, takes the place of a good one when its time has come: peers would
    /// refuse it before. Without a good one it is used at once: it may be our clock that is wrong.
    async fn wait_for_begin(&self, next: &Current) {
        let now = (self.clock)();
        let Ok(ahead) = next.not_before.duration_since(now) else {
            return;
        };
        let left = {
            let state = self.state.borrow();
            let left = state
                .current
                .as_ref()
                .map(|current| current.not_after.duration_since(now));
            left.and_then(Result::ok).unwrap_or_default()
        };
        if !ahead.is_zero() {
            tracing::warn!(id = %self.id, ?ahead, "a new certificate begins later: a clock is wrong, here or where it was made");
            tokio::time::sleep(ahead.min(left)).await;
        }
    }

    fn replace(&self, current: Current) {
        tracing::info!(id = %self.id, "new certificate");
        self.state.send_replace(State {
            current: Some(Arc::new(current)),
            failure: None,
        });
    }

    fn keep(&self, failure: Cause) {
        self.state.send_modify(|state| {
            let error: &(dyn std::error::Error + 'static) = &*failure;
            tracing::warn!(id = %self.id, has_one = state.current.is_some(), error, "no new certificate");
            state.failure = Some(Arc::clone(&failure));
        });
    }
}

/// Why the source's answer is not used.
#[derive(Debug, thiserror::Error)]
enum Refused {
    #[error("the source answered with a certificate for {0}")]
    OtherIdentity(SpiffeId),
    #[error("the source answered with a certificate that has expired at {0}")]
    Expired(time::OffsetDateTime),
    #[error(transparent)]
    Tls(#[from] super::tls::Error),
}

/// The source said nothing at all.
#[derive(Debug, thiserror::Error)]
#[error("the source of certificates did not answer within {0:?}")]
struct Unanswered(Duration);

#[cfg(test)]
mod tests;
