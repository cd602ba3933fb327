//! When certificates are asked for, where somebody must be asked for each: [`Renewing`] makes a [`CertSource`] of an [`Issuer`].
//!
//! The values are ztunnel's (`identity/manager.rs`), but for two: without a certificate the next try is never far, and when the
//! issuer answers one identity again, all others that wait ask too. So a return is noticed within seconds, by however many.

use std::{
    future::Future,
    sync::Arc,
    time::{Duration, SystemTime},
};

use futures_util::{
    StreamExt,
    stream::{self, BoxStream},
};
use tokio::{
    sync::{Semaphore, watch},
    time::{Instant, timeout},
};

use super::{CertSource, Error, Svid, tls::Credentials};
use crate::mesh::spiffe::SpiffeId;

/// Whoever makes a certificate when asked.
pub trait Issuer: Send + Sync + 'static {
    /// A new certificate for `id`, with a key of its own.
    fn issue(&self, id: &SpiffeId) -> impl Future<Output = Result<Svid, Error>> + Send;
}

/// Requests at once, and how many of them may be for identities that have a certificate still, or that got none when they asked:
/// these can wait, and must not keep out a pod that comes new, however long each request takes.
const REQUESTS: (usize, usize) = (8, 6);

/// Time for one request.
pub(super) const REQUEST_DEADLINE: Duration = Duration::from_secs(30);

/// First wait after a failure, and the longest one while there is a certificate and while there is none.
const BACKOFF: (Duration, Duration, Duration) = (
    Duration::from_millis(500),
    Duration::from_secs(150),
    Duration::from_secs(5),
);

/// Shortest wait between two certificates of one identity, whatever their lifetime.
const MIN_RENEWAL: Duration = Duration::from_secs(1);

/// How often the wall clock is looked at while waiting: it goes on when the machine sleeps, and the timer does not.
const WALL_CLOCK_CHECK: Duration = Duration::from_secs(60);

/// Certificates of an issuer, each renewed at half of its life.
pub struct Renewing<I>(Arc<Shared<I>>);

struct Shared<I> {
    issuer: I,
    requests: Semaphore,
    /// Those of them that can wait.
    patient: Semaphore,
    /// Changes when the issuer answers after a failure.
    recovered: watch::Sender<()>,
}

/// One identity.
struct Renewal<I> {
    shared: Arc<Shared<I>>,
    id: SpiffeId,
    /// Of the newest certificate: from when it is here, and to.
    validity: Option<(SystemTime, SystemTime)>,
    /// Failures since then.
    failures: u32,
    begun: bool,
}

impl<I: Issuer> Renewing<I> {
    /// Of `issuer`.
    pub fn new(issuer: I) -> Self {
        Self(Arc::new(Shared {
            issuer,
            requests: Semaphore::new(REQUESTS.0),
            patient: Semaphore::new(REQUESTS.1),
            recovered: watch::Sender::default(),
        }))
    }
}

impl<I: Issuer> CertSource for Renewing<I> {
    fn svids(&self, id: &SpiffeId) -> BoxStream<'static, Result<Svid, Error>> {
        let renewal = Renewal {
            shared: Arc::clone(&self.0),
            id: id.clone(),
            validity: None,
            failures: 0,
            begun: false,
        };
        stream::unfold(renewal, |mut renewal| async move {
            let next = renewal.next().await;
            Some((next, renewal))
        })
        .boxed()
    }
}

impl<I: Issuer> Renewal<I> {
    async fn next(&mut self) -> Result<Svid, Error> {
        if self.begun {
            self.pause().await;
        }
        self.begun = true;
        let issued = self.issue().await;
        match &issued {
            Ok(svid) => {
                // From when it came, if that is later: some authorities give certificates a past, for clocks that are behind.
                self.validity = Some((svid.not_before.max(SystemTime::now()), svid.not_after));
                if self.failures > 0 {
                    self.shared.recovered.send_replace(());
                }
                self.failures = 0;
            }
            Err(_) => self.failures = self.failures.saturating_add(1),
        }
        issued
    }

    async fn issue(&self) -> Result<Svid, Error> {
        let closed = "the semaphores are never closed";
        let can_wait = self.failures > 0 || self.valid_for().is_some();
        let _patient = match can_wait {
            true => Some(self.shared.patient.acquire().await.expect(closed)),
            false => None,
        };
        let _request = self.shared.requests.acquire().await.expect(closed);
        let failed = |why: Box<dyn std::error::Error + Send + Sync>| {
            Error::new(format!("certificate for {}", self.id), why)
        };
        let issuing = self.shared.issuer.issue(&self.id);
        let late = |_| failed(format!("no answer within {REQUEST_DEADLINE:?}").into());
        let svid = timeout(REQUEST_DEADLINE, issuing).await.map_err(late)??;
        // One that cannot be used is a failure like others: by its own times, the next one would be hours away.
        if SystemTime::now() >= svid.not_after {
            return Err(failed(Box::new(Over(svid.not_after))));
        }
        Credentials::new(&svid).map_err(|error| failed(Box::new(error)))?;
        Ok(svid)
    }

    /// How long the newest certificate is still valid.
    fn valid_for(&self) -> Option<Duration> {
        let (_, not_after) = self.validity?;
        let left = not_after.duration_since(SystemTime::now()).ok()?;
        (!left.is_zero()).then_some(left)
    }

    async fn pause(&self) {
        if self.failures == 0 {
            let Some((from, to)) = self.validity else {
                return;
            };
            let life = to.duration_since(from).unwrap_or_default();
            // Half of its life, give or take a tenth: pods that started together don't renew together.
            let at = from + life.mul_f64(rand::random_range(0.4..0.6));
            let wait = at.duration_since(SystemTime::now()).unwrap_or_default();
            return sleep(wait.max(MIN_RENEWAL)).await;
        }
        let (first, with, without) = BACKOFF;
        let doubled = first * 2_u32.saturating_pow((self.failures - 1).min(16));
        let some = |wait: Duration| wait.mul_f64(rand::random_range(0.8..1.2));
        let wait = match self.valid_for() {
            // What is here must not end while nobody asks.
            Some(left) => some(doubled.min(with)).min(left / 2).max(first),
            None => some(doubled.min(without)),
        };
        // Not all at one instant.
        let spread = Duration::from_secs(1).mul_f64(rand::random_range(0.0..1.0));
        let mut recovered = self.shared.recovered.subscribe();
        tokio::select! {
            () = sleep(wait) => {}
            _ = recovered.changed() => sleep(spread.min(wait)).await,
        }
    }
}

/// A certificate that came too late to be of use.
#[derive(Debug, thiserror::Error)]
#[error("it expired at {} before it came: a clock is wrong, here or where it was made", time::OffsetDateTime::from(*.0))]
struct Over(SystemTime);

/// Sleeps by the timer or by the wall clock, whichever gets there first.
async fn sleep(duration: Duration) {
    let (timer, wall) = (Instant::now() + duration, SystemTime::now() + duration);
    while Instant::now() < timer && SystemTime::now() < wall {
        tokio::time::sleep_until(timer.min(Instant::now() + WALL_CLOCK_CHECK)).await;
    }
}

#[cfg(test)]
mod tests;
