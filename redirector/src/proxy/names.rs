//! Addresses of host names, for workloads that have nothing else: what `getaddrinfo(3)` of the node says. It tells no lifetimes, so
//! answers are kept for a short time.

use std::{
    collections::HashMap,
    io,
    net::{IpAddr, ToSocketAddrs},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use tokio::{
    sync::{Semaphore, watch},
    time::{Instant, timeout_at},
};

/// For so long an answer counts, a failure too.
const FRESH: Duration = Duration::from_secs(5);

/// Time that a connection waits for all the names that it needs; who waits longer is refused. resolv.conf(5) has 5 s for each server.
pub(super) const DEADLINE: Duration = Duration::from_secs(10);

/// Names that are asked for at once: each is a thread that blocks. Many, since a resolver that is slow for one name holds up others.
const AT_ONCE: usize = 64;

/// More names than these are looked through for stale ones.
const MANY: usize = 1_024;

/// A resolver with a cache.
#[derive(Debug)]
pub struct Names {
    known: Mutex<HashMap<Arc<str>, Entry>>,
    turns: Arc<Semaphore>,
    ask: fn(&str) -> io::Result<Vec<IpAddr>>,
}

#[derive(Debug)]
struct Entry {
    answer: watch::Receiver<Option<Found>>,
}

/// What was found, and when.
type Found = (Result<Arc<[IpAddr]>, Arc<io::Error>>, Instant);

/// What came of a name: addresses, at least one.
pub(super) type Answer = Result<Arc<[IpAddr]>, Error>;

/// Why a name has no address.
#[derive(Debug, Clone, thiserror::Error)]
pub(super) enum Error {
    #[error("host name {hostname:?} cannot be resolved")]
    Failed {
        hostname: Arc<str>,
        #[source]
        source: Arc<io::Error>,
    },
    #[error(
        "host name {hostname:?} was not resolved within {DEADLINE:?}, which a connection has for all names"
    )]
    TimedOut { hostname: Arc<str> },
}

impl Default for Names {
    fn default() -> Self {
        Self::asking(|hostname| {
            let found = (hostname, 0).to_socket_addrs()?;
            Ok(found.map(|address| address.ip()).collect())
        })
    }
}

impl Names {
    fn asking(ask: fn(&str) -> io::Result<Vec<IpAddr>>) -> Self {
        Self {
            known: Mutex::default(),
            turns: Arc::new(Semaphore::new(AT_ONCE)),
            ask,
        }
    }

    /// The addresses of a name, before `deadline`.
    pub(super) async fn resolve(&self, hostname: &Arc<str>, deadline: Instant) -> Answer {
        let mut answer = self.answer(hostname);
        let answered = timeout_at(deadline, answer.wait_for(Option::is_some)).await;
        match answered {
            // An error is a question that nobody asks any more: it could not even begin.
            Err(_) | Ok(Err(_)) => Err(Error::TimedOut {
                hostname: hostname.clone(),
            }),
            Ok(Ok(answer)) => match &*answer {
                Some((Ok(addresses), _)) => Ok(addresses.clone()),
                Some((Err(source), _)) => Err(Error::Failed {
                    hostname: hostname.clone(),
                    source: source.clone(),
                }),
                None => Err(Error::TimedOut {
                    hostname: hostname.clone(),
                }),
            },
        }
    }

    /// Of many that ask for one name at a time, one question is asked, and it outlives them: a thread that blocks cannot be called back.
    fn answer(&self, hostname: &Arc<str>) -> watch::Receiver<Option<Found>> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(entry) = known.get(hostname)
            && entry.counts()
        {
            return entry.answer.clone();
        }
        if known.len() >= MANY {
            known.retain(|_, entry| entry.counts());
        }
        let (sender, answer) = watch::channel(None);
        let entry = Entry {
            answer: answer.clone(),
        };
        known.insert(hostname.clone(), entry);
        let (turns, ask, hostname) = (self.turns.clone(), self.ask, hostname.clone());
        tokio::spawn(async move {
            // Never closed.
            let turn = turns.acquire_owned().await;
            let asked = tokio::task::spawn_blocking(move || {
                let _turn = turn;
                let found = ask(&hostname)?;
                match found.is_empty() {
                    true => Err(io::Error::new(io::ErrorKind::NotFound, "it has no address")),
                    false => Ok(found),
                }
            });
            let found = asked.await.unwrap_or_else(|error| Err(io::Error::other(error)));
            // All that asked may have gone.
            let found = found.map(Into::into).map_err(Arc::new);
            let _ = sender.send(Some((found, Instant::now())));
        });
        answer
    }
}

impl Entry {
    /// A question that is still open counts, however long it takes: a second one would not be faster.
    fn counts(&self) -> bool {
        match &*self.answer.borrow() {
            Some((_, at)) => at.elapsed() < FRESH,
            None => self.answer.has_changed().is_ok(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    fn soon() -> Instant {
        Instant::now() + DEADLINE
    }

    #[tokio::test]
    async fn a_name_that_is_an_address_needs_nobody_and_one_that_is_none_says_why() {
        let names = Names::default();
        for text in ["127.0.0.1", "::1"] {
            let found = names.resolve(&text.into(), soon()).await.unwrap();
            assert_eq!(*found, [text.parse::<IpAddr>().unwrap()]);
        }
        let error = names.resolve(&"no such name".into(), soon()).await.unwrap_err();
        assert!(error.to_string().contains("\"no such name\""), "{error}");
    }

    #[tokio::test]
    async fn a_name_is_asked_for_once_however_many_want_it_until_the_answer_is_old() {
        static ASKED: AtomicUsize = AtomicUsize::new(0);
        let names = Arc::new(Names::asking(|_| {
            ASKED.fetch_add(1, Ordering::Relaxed);
            std::thread::sleep(Duration::from_millis(20));
            Ok(vec![[10, 0, 0, 1].into()])
        }));
        let all: Vec<_> = (0..100)
            .map(|_| {
                let names = names.clone();
                tokio::spawn(async move { names.resolve(&"db".into(), soon()).await.unwrap() })
            })
            .collect();
        for one in all {
            assert_eq!(*one.await.unwrap(), [IpAddr::from([10, 0, 0, 1])]);
        }
        assert_eq!(ASKED.load(Ordering::Relaxed), 1);
        tokio::time::pause();
        tokio::time::advance(FRESH).await;
        names.resolve(&"db".into(), soon()).await.unwrap();
        assert_eq!(ASKED.load(Ordering::Relaxed), 2);
    }

    #[tokio::test]
    async fn stale_names_leave_when_there_are_many() {
        let names = Names::asking(|_| Err(io::ErrorKind::NotFound.into()));
        for number in 0..MANY {
            names
                .resolve(&number.to_string().into(), soon())
                .await
                .unwrap_err();
        }
        tokio::time::pause();
        tokio::time::advance(FRESH).await;
        names.resolve(&"one more".into(), soon()).await.unwrap_err();
        assert_eq!(names.known.lock().unwrap().len(), 1);
    }
}
