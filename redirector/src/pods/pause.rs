//! Parts of the agent that rest for a while: they finish what they have begun, begin nothing, and go on when whoever has asked lets
//! them, or is gone.

use std::{convert::Infallible, future::pending};

use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;

/// Asks a part to rest.
#[derive(Debug)]
pub struct Pauser<T>(mpsc::Sender<Pause<T>>);

/// Where a part is asked.
#[derive(Debug)]
pub struct Pauses<T>(mpsc::Receiver<Pause<T>>);

/// That a part is to rest; it tells a `T` when it does.
#[derive(Debug)]
pub struct Pause<T> {
    resting: oneshot::Sender<T>,
    until: oneshot::Receiver<Infallible>,
}

/// The part rests for as long as this value lives.
#[derive(Debug)]
#[must_use = "the part goes on when it is dropped"]
pub struct Rest(#[expect(dead_code, reason = "that it is there is all it says")] oneshot::Sender<Infallible>);

/// Both ends for one part.
pub fn pauses<T>() -> (Pauser<T>, Pauses<T>) {
    let (sender, receiver) = mpsc::channel(1);
    (Pauser(sender), Pauses(receiver))
}

impl<T> Pauser<T> {
    /// Waits until the part rests, and returns what it tells then; `None` if it has ended. It goes on at once if the wait is given up.
    pub async fn rest(&self) -> Option<(T, Rest)> {
        let (resting, told) = oneshot::channel();
        let (rest, until) = oneshot::channel();
        self.0.send(Pause { resting, until }).await.ok()?;
        Some((told.await.ok()?, Rest(rest)))
    }
}

impl<T> Pauses<T> {
    /// The next time that the part is asked. Cancel-safe.
    pub async fn next(&mut self) -> Pause<T> {
        match self.0.recv().await {
            Some(pause) => pause,
            None => pending().await,
        }
    }
}

impl<T> Pause<T> {
    /// Returns when nobody waits any more for the part to rest.
    pub async fn given_up(&mut self) {
        self.resting.closed().await;
    }

    /// Rests until the part may go on, or `stop`; tells whether it goes on.
    #[must_use]
    pub async fn rest(self, told: T, stop: &CancellationToken) -> bool {
        if self.resting.send(told).is_ok() {
            tokio::select! {
                _ = self.until => {}
                () = stop.cancelled() => {}
            }
        }
        !stop.is_cancelled()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_part_rests_as_long_as_it_is_asked_to() {
        let (pauser, mut pauses) = pauses();
        let (went_on, mut rounds) = mpsc::channel(1);
        let stop = CancellationToken::new();
        let part = tokio::spawn({
            let stop = stop.clone();
            async move {
                for round in 0.. {
                    let goes_on = pauses.next().await.rest(round, &stop).await;
                    went_on.send((round, goes_on)).await.unwrap();
                }
            }
        });
        for round in 0..3 {
            let (told, rest) = pauser.rest().await.unwrap();
            assert_eq!(told, round);
            assert!(rounds.try_recv().is_err());
            drop(rest);
            assert_eq!(rounds.recv().await, Some((round, true)));
        }
        let (_, _rest) = pauser.rest().await.unwrap();
        stop.cancel();
        assert_eq!(rounds.recv().await, Some((3, false)));
        part.abort();
        assert!(part.await.unwrap_err().is_cancelled());
        assert!(pauser.rest().await.is_none());
    }

    #[tokio::test]
    async fn a_wait_that_is_given_up_holds_nothing_up() {
        let (pauser, mut pauses) = pauses::<()>();
        let asked = tokio::spawn(async move { pauser.rest().await });
        let mut pause = pauses.next().await;
        asked.abort();
        pause.given_up().await;
        assert!(pause.rest((), &CancellationToken::new()).await);
    }
}
