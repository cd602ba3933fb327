//! The last step of all three paths, once both legs stand: copy, end each leg as the copying did, and close the record.
//!
//! Thousands of connections are idle in here at a time. The functions are no `async fn`, which would hold its arguments twice: as they
//! came, and as they are used.

use std::{future::Future, time::Duration};

use super::{
    copy::{self, Leg},
    hbone::stream::{H2Sink, H2Source},
    record::Record,
};

/// Between two TCP legs. `local` is the one of the pod's own application.
#[expect(clippy::manual_async_fn, reason = "see above: its arguments are held once")]
pub(super) fn plain(
    mut local: Leg,
    mut remote: Leg,
    record: Box<Record>,
    tail_deadline: Duration,
) -> impl Future<Output = ()> + Send {
    async move {
        let result = {
            let (mut local, mut remote) = (local.split(), remote.split());
            copy::both(
                (&mut local.0, &mut local.1),
                (&mut remote.0, &mut remote.1),
                record.counts(),
                tail_deadline,
            )
            .await
        };
        tokio::join!(local.end(&result), remote.end(&result));
        record.end(result);
    }
}

/// Between the pod's own application and a stream of a tunnel. Whatever else belongs to the stream must outlive this.
#[expect(clippy::manual_async_fn, reason = "see above: its arguments are held once")]
pub(super) fn tunnelled(
    mut local: Leg,
    (source, sink): (&mut H2Source, &mut H2Sink),
    record: Box<Record>,
    tail_deadline: Duration,
) -> impl Future<Output = ()> + Send {
    async move {
        let result = {
            let mut local = local.split();
            copy::both(
                (&mut local.0, &mut local.1),
                (&mut *source, &mut *sink),
                record.counts(),
                tail_deadline,
            )
            .await
        };
        tokio::join!(local.end(&result), sink.end(&result));
        record.end(result);
    }
}
