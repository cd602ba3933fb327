//! The certificates of this node's pods, and the revocation lists, as metrics: read from the store whenever somebody asks. Series go with their identities.

use std::{fmt, sync::Arc};

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric},
    metrics::{MetricType, gauge::ConstGauge},
    registry::Registry,
};

use super::store::Store;

/// Names them in `registry`.
pub fn register(registry: &mut Registry, store: Arc<Store>) {
    registry.register_collector(Box::new(Certificates(store)));
}

struct Certificates(Arc<Store>);

impl fmt::Debug for Certificates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Certificates")
    }
}

impl Collector for Certificates {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        self.revocations(&mut encoder)?;
        let all = self.0.seconds_left();
        if all.is_empty() {
            return Ok(());
        }
        let mut gauge = |name: &str, help: &str, values: Vec<(&str, i64)>| {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            values.into_iter().try_for_each(|(identity, value)| {
                let gauge = ConstGauge::new(value);
                gauge.encode(family.encode_family(&[("identity", identity)])?)
            })
        };
        let valid = all.iter().map(|(id, left)| {
            let is_valid = left.is_some_and(|left| left > 0);
            (id.as_str(), i64::from(is_valid))
        });
        let left = all.iter().filter_map(|(id, left)| Some((id.as_str(), (*left)?)));
        gauge(
            "redirector_certificate_valid",
            "1 for an identity with a certificate that is valid, 0 for one without",
            valid.collect(),
        )?;
        gauge(
            "redirector_certificate_expires_in_seconds",
            "Time to the end of an identity's certificate; below 0 it is over, and there is none if it never had one",
            left.collect(),
        )
    }
}

impl Certificates {
    /// Of the file of revocation lists, if there is to be one.
    fn revocations(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let Some(view) = self.0.revocations() else {
            return Ok(());
        };
        let overdue = view.lists.iter().filter(|list| list.is_overdue).count();
        let revoked: usize = view.lists.iter().map(|list| list.revoked).sum();
        for (name, help, value) in [
            (
                "redirector_revocation_lists",
                "Revocation lists that are in force",
                view.lists.len(),
            ),
            (
                "redirector_revocation_lists_overdue",
                "Those whose successor should be here: they count all the same",
                overdue,
            ),
            (
                "redirector_revoked_certificates",
                "Certificates on the lists that are in force",
                revoked,
            ),
            (
                "redirector_revocation_problem",
                "1 while the newest content of the file of revocation lists is not in force",
                usize::from(view.problem.is_some()),
            ),
        ] {
            let gauge = ConstGauge::new(i64::try_from(value).unwrap_or(i64::MAX));
            gauge.encode(encoder.encode_descriptor(name, help, None, MetricType::Gauge)?)?;
        }
        Ok(())
    }
}
