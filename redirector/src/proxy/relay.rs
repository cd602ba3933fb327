//! The last step of all three paths, once both legs stand: copy, end each leg as the copying did, and close the record.

use std::time::Duration;

use super::{
    copy::{self, Leg},
    hbone::stream::{H2Sink, H2Source},
    record::Record,
};

/// Between two TCP legs. `local` is the one of the pod's own application.
pub(super) async fn plain(mut local: Leg, mut remote: Leg, record: Box<Record>, tail_deadline: Duration) {
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

/// Between the pod's own application and a stream of a tunnel. Whatever else belongs to the stream must outlive this.
pub(super) async fn tunnelled(
    mut local: Leg,
    (source, sink): (&mut H2Source, &mut H2Sink),
    record: Box<Record>,
    tail_deadline: Duration,
) {
    let result = {
        let mut local = local.split();
        copy::both(
            (&mut local.0, &mut local.1),
            (source, sink),
            record.counts(),
            tail_deadline,
        )
        .await
    };
    tokio::join!(local.end(&result), sink.end(&result));
    record.end(result);
}
