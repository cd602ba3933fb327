//! What an outbound decision leaves to chance, for one connection.

use std::{net::IpAddr, sync::Arc};

use tokio::time::Instant;

use super::names::{self, Names};
use crate::mesh::route::{Chance, NoRoute};

/// Numbers by chance, and the names that this connection has asked for.
#[derive(Default)]
pub(super) struct Draw {
    names: Vec<(Arc<str>, names::Answer)>,
    /// For all of them.
    deadline: Option<Instant>,
}

impl Chance for Draw {
    fn below(&mut self, weights: u64) -> u64 {
        match weights {
            0 => 0,
            weights => rand::random_range(0..weights),
        }
    }

    fn resolved(&self, hostname: &str) -> Option<&[IpAddr]> {
        let (_, answer) = self.names.iter().find(|(name, _)| **name == *hostname)?;
        Some(answer.as_ref().map_or(&[], |addresses| addresses))
    }
}

impl Draw {
    /// The name that is to be asked for before there is another answer than `error`.
    pub(super) fn lacks(&self, error: &NoRoute) -> Option<Arc<str>> {
        let hostname = error.unresolved()?;
        self.resolved(hostname).is_none().then(|| hostname.clone())
    }

    /// Asks for a name.
    pub(super) async fn resolve(&mut self, hostname: Arc<str>, names: &Names) {
        let deadline = *self
            .deadline
            .get_or_insert_with(|| Instant::now() + names::DEADLINE);
        let answer = names.resolve(&hostname, deadline).await;
        self.names.push((hostname, answer));
    }

    /// Why the name has no address for want of which there is `error`.
    pub(super) fn failed(self, error: &NoRoute) -> Option<names::Error> {
        let hostname = error.unresolved()?;
        let mut answers = self.names.into_iter();
        let (_, answer) = answers.find(|(name, _)| name == hostname)?;
        answer.err()
    }
}
