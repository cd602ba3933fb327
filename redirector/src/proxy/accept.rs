//! The accept loop that a pod's listeners share: bounded, backing off when files run out, a task per connection.

use std::{
    future::Future,
    io,
    net::SocketAddr,
    os::fd::{AsFd, BorrowedFd},
    sync::Arc,
    time::Duration,
};

use futures_util::FutureExt;
use tokio::{
    net::{TcpListener, TcpStream},
    sync::Semaphore,
    time::sleep,
};
use tokio_util::task::task_tracker::TaskTrackerToken;

use super::{Pod, record::Direction};
use crate::sys::socket;

/// First pause after an accept that failed for want of files or memory; doubled up to [`BACK_OFF_MOST`].
const BACK_OFF_FIRST: Duration = Duration::from_millis(10);
/// Longest pause; the first connection after the want is over waits that long at most.
const BACK_OFF_MOST: Duration = Duration::from_secs(1);

/// A listening socket whose connections are being accepted until the pod drains.
pub(super) struct Listener(Arc<Tracked>);

struct Tracked {
    listener: TcpListener,
    _tracked: TaskTrackerToken,
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.listener.as_fd()
    }
}

impl Listener {
    /// Begins to accept, and runs `connection` for each, in a task of the pod's.
    pub(super) fn start<F>(
        pod: &Arc<Pod>,
        listener: TcpListener,
        direction: Direction,
        connection: impl Fn(Arc<Pod>, TcpStream, SocketAddr) -> F + Send + 'static,
    ) -> Self
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let listener = Arc::new(Tracked {
            listener,
            _tracked: pod.shared.listening.token(),
        });
        let task = accept(pod.clone(), listener.clone(), direction, connection);
        let drain = pod.drain.clone();
        pod.tasks
            .spawn(async move { drain.run_until_cancelled_owned(task).await });
        Self(listener)
    }
}

async fn accept<F>(
    pod: Arc<Pod>,
    listener: Arc<Tracked>,
    direction: Direction,
    connection: impl Fn(Arc<Pod>, TcpStream, SocketAddr) -> F,
) where
    F: Future<Output = ()> + Send + 'static,
{
    pod.shared.open.cancelled().await;
    let bound = Arc::new(Semaphore::new(pod.shared.config.max_connections));
    let mut back_off = BackOff(BACK_OFF_FIRST);
    loop {
        let permit = bound
            .clone()
            .acquire_owned()
            .await
            .expect("the semaphore is never closed");
        match listener.listener.accept().await {
            Ok((stream, peer)) => {
                back_off = BackOff(BACK_OFF_FIRST);
                let task = connection(pod.clone(), stream, socket::canonical(peer));
                // Not an async block: it would hold the task twice, as what it captured and as what it awaits.
                let held = (permit, pod.shared.metrics.socket(direction));
                pod.spawn(task.map(move |()| drop(held)));
            }
            Err(error) => {
                let pause = back_off.after(&error);
                if !pause.is_zero() {
                    tracing::warn!(uid = %pod.info.uid, %error, ?pause, "cannot accept connections");
                }
                sleep(pause).await;
            }
        }
    }
}

/// How long to wait after a failed accept.
struct BackOff(Duration);

impl BackOff {
    fn after(&mut self, error: &io::Error) -> Duration {
        // accept(2): errors of the connection that was to be accepted, such as ECONNABORTED, say nothing of the next. What
        // is unknown is treated as want: spinning is worse than waiting.
        use io::ErrorKind::{ConnectionAborted, ConnectionReset, Interrupted};
        if matches!(error.kind(), ConnectionAborted | ConnectionReset | Interrupted) {
            return Duration::ZERO;
        }
        let pause = self.0;
        self.0 = (pause * 2).min(BACK_OFF_MOST);
        pause
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn want_of_files_is_waited_out_and_a_lost_connection_is_not() {
        let mut back_off = BackOff(BACK_OFF_FIRST);
        let emfile = io::Error::from_raw_os_error(libc::EMFILE);
        let pauses: Vec<u128> = (0..10).map(|_| back_off.after(&emfile).as_millis()).collect();
        assert_eq!(pauses, [10, 20, 40, 80, 160, 320, 640, 1000, 1000, 1000]);
        let aborted = io::Error::from_raw_os_error(libc::ECONNABORTED);
        assert_eq!(back_off.after(&aborted), Duration::ZERO);
        for want in [libc::ENFILE, libc::ENOBUFS, libc::ENOMEM, libc::EINVAL] {
            assert!(!back_off.after(&io::Error::from_raw_os_error(want)).is_zero());
        }
    }
}
