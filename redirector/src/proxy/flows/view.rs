//! Connections as the admin endpoint tells of them.

use std::{net::SocketAddr, sync::Arc, time::SystemTime};

use serde::Serialize;

use super::{
    super::record::{Direction, Party, Security},
    Facts, Flag, Flow, Told,
};
use crate::telemetry::logs;

/// The answer to `GET /connections`.
#[derive(Debug, Serialize)]
pub struct ConnectionsView {
    connections: Vec<FlowView>,
    /// How many there are, shown or not.
    total: usize,
}

/// The answer to `GET /flows`.
#[derive(Debug, Serialize)]
pub struct FlowsView {
    /// What to ask for next.
    next: u64,
    /// How many were forgotten before they were asked for.
    lost: u64,
    flows: Vec<FlowView>,
}

impl ConnectionsView {
    pub(super) fn of(flows: &[Arc<Flow>], total: usize) -> Self {
        Self {
            connections: flows.iter().map(|flow| FlowView::open(flow)).collect(),
            total,
        }
    }
}

impl FlowsView {
    pub(super) fn of(ended: &[Told], next: u64, lost: u64) -> Self {
        Self {
            next,
            lost,
            flows: ended.iter().map(FlowView::ended).collect(),
        }
    }
}

/// The open connections of a pod, as in ztunnel's config dump.
#[derive(Debug, Default, Serialize)]
pub struct OfPod {
    inbound: Vec<Ends>,
    outbound: Vec<Ends>,
}

/// Where a connection comes from and goes to.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Ends {
    src: SocketAddr,
    /// What a client asked for; of a server, the service that was called, if that is known.
    original_dst: Option<String>,
    /// Where that led to: of a server, its application.
    actual_dst: Option<String>,
    protocol: &'static str,
}

impl OfPod {
    pub(super) fn add(&mut self, flow: &Flow) {
        let facts = &flow.facts;
        let dst = facts.dst.map(|dst| dst.to_string());
        let (all, original_dst, actual_dst) = match flow.direction {
            Direction::Inbound => {
                let called = facts.service.as_ref();
                let called = called.map(|service| service.host.hostname.to_string());
                (
                    &mut self.inbound,
                    called,
                    facts.hbone_dst.as_ref().map(ToString::to_string).or(dst),
                )
            }
            Direction::Outbound => {
                let original_dst = facts.original_dst.map(|dst| dst.to_string());
                (&mut self.outbound, original_dst, dst)
            }
        };
        all.push(Ends {
            src: flow.src,
            original_dst,
            actual_dst,
            protocol: protocol(flow.open.as_ref().map(|open| open.security), facts),
        });
    }
}

/// A connection.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct FlowView {
    id: u64,
    direction: &'static str,
    started: String,
    duration_ms: u64,
    state: &'static str,
    /// Unknown of what failed before it was known where it goes.
    security: Option<&'static str>,
    src: Source,
    dst: Destination,
    pod: Pod,
    bytes_sent: u64,
    bytes_received: u64,
    protocol: &'static str,
    policy: Option<String>,
    response_flags: &'static str,
    error: Option<String>,
}

#[derive(Debug, Serialize)]
struct Source {
    addr: SocketAddr,
    #[serde(flatten)]
    party: PartyView,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Destination {
    addr: Option<SocketAddr>,
    hbone_addr: Option<String>,
    service: Option<String>,
    #[serde(flatten)]
    party: PartyView,
}

#[derive(Debug, Serialize)]
struct PartyView {
    workload: Option<String>,
    namespace: Option<String>,
    identity: Option<String>,
}

#[derive(Debug, Serialize)]
struct Pod {
    uid: String,
    namespace: String,
    name: String,
}

impl FlowView {
    fn open(flow: &Flow) -> Self {
        Self::of(&flow.told(Flag::None, None), "open")
    }

    fn ended(ended: &Told) -> Self {
        let state = match ended.error {
            None => "complete",
            Some(_) => "failed",
        };
        Self::of(ended, state)
    }

    fn of(told: &Told, state: &'static str) -> Self {
        let facts = &told.facts;
        Self {
            id: told.id,
            direction: told.direction.as_str(),
            started: milliseconds(told.started),
            duration_ms: u64::try_from(told.duration.as_millis()).unwrap_or(u64::MAX),
            state,
            security: told.security.map(|security| facts.security_of(security)),
            src: Source {
                addr: told.src,
                party: (&facts.source).into(),
            },
            dst: Destination {
                addr: facts.dst,
                hbone_addr: facts.hbone_dst.as_ref().map(ToString::to_string),
                service: facts
                    .service
                    .as_ref()
                    .map(|service| service.host.hostname.to_string()),
                party: (&facts.destination).into(),
            },
            pod: Pod {
                uid: told.pod.uid.to_string(),
                namespace: told.pod.namespace.clone(),
                name: told.pod.name.clone(),
            },
            bytes_sent: told.bytes_sent,
            bytes_received: told.bytes_received,
            protocol: protocol(told.security, facts),
            policy: told.policy.as_ref().map(ToString::to_string),
            response_flags: told.flag.as_str(),
            error: told.error.as_deref().map(str::to_owned),
        }
    }
}

fn protocol(security: Option<Security>, facts: &Facts) -> &'static str {
    match (security, facts.nested) {
        (Some(Security::MutualTls), true) => "DOUBLEHBONE",
        (Some(Security::MutualTls), false) => "HBONE",
        _ => "TCP",
    }
}

impl From<&Party> for PartyView {
    fn from(party: &Party) -> Self {
        Self {
            workload: party.workload.as_deref().map(str::to_owned),
            namespace: party.namespace.as_deref().map(str::to_owned),
            identity: party.identity.as_ref().map(ToString::to_string),
        }
    }
}

/// RFC 3339, UTC, milliseconds.
fn milliseconds(time: SystemTime) -> String {
    let mut text = logs::timestamp(time);
    // `…56.345678Z`: three digits less.
    text.truncate(text.len() - "678Z".len());
    text.push('Z');
    text
}
