//! The pod table with whatever proxies: this agent's, or other processes'.

use std::{io, pin::Pin, sync::Arc};

use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

use crate::{
    pods::{
        PodEvent,
        launch::{Launch, Served},
        lifecycle::{self, Lifecycle},
        pause::Pauses,
        records::Records,
        status,
    },
    redirect::Redirector,
};

/// What the pod table is made of, whoever the proxies are.
pub(super) struct Table {
    pub(super) redirector: Arc<dyn Redirector>,
    pub(super) records: Records,
    pub(super) settings: lifecycle::Config,
    pub(super) metrics: status::Metrics,
    pub(super) events: mpsc::Receiver<PodEvent>,
    pub(super) pauses: Pauses<io::Result<Vec<Served>>>,
    pub(super) stop: CancellationToken,
}

impl Table {
    /// The table's task, and a view of it.
    pub(super) fn of<L: Launch>(
        self,
        launch: L,
    ) -> (
        Pin<Box<dyn Future<Output = ()> + Send>>,
        watch::Receiver<status::Status>,
    ) {
        let Self {
            redirector,
            records,
            settings,
            metrics,
            events,
            pauses,
            stop,
        } = self;
        let (lifecycle, pods) = Lifecycle::new(launch, redirector, records, settings, metrics);
        (Box::pin(lifecycle.run(events, pauses, stop)), pods)
    }
}
