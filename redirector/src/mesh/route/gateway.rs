//! Waypoints and network gateways: which workload a [`GatewayAddress`] stands for.

use std::{
    fmt,
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use super::{Caller, NoRoute};
use crate::mesh::{
    balance::{self, Chance, Endpoint, Purpose},
    index::Mesh,
    service::Service,
    workload::{GatewayAddress, GatewayDestination, Workload},
};

/// A service or a workload.
#[derive(Clone, Copy)]
pub(super) enum Found<'a> {
    Service(&'a Arc<Service>),
    Workload(&'a Arc<Workload>),
}

impl<'a> Found<'a> {
    pub(super) fn service(self) -> Option<&'a Arc<Service>> {
        match self {
            Self::Service(service) => Some(service),
            Self::Workload(_) => None,
        }
    }
}

impl fmt::Display for Found<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Service(service) => service.host.fmt(f),
            Self::Workload(workload) => workload.uid.fmt(f),
        }
    }
}

/// The workload that is to be asked, and the service that it was chosen through, if it was.
pub(super) struct Chosen<'a> {
    pub(super) endpoint: Endpoint<'a>,
    pub(super) service: Option<&'a Arc<Service>>,
}

/// Chooses a workload of a waypoint or gateway, reached by `family`'s family if there is a choice.
pub(super) fn choose<'a>(
    caller: &Caller<'a>,
    gateway: &GatewayAddress,
    purpose: Purpose,
    family: IpAddr,
    chance: &mut dyn Chance,
) -> Result<Chosen<'a>, NoRoute> {
    let port = gateway.hbone_mtls_port;
    let (found, near) = match &gateway.destination {
        GatewayDestination::Address(at) => (find(caller, gateway), at.address),
        GatewayDestination::Hostname(_) => (find(caller, gateway), family),
    };
    match found {
        Some(Found::Service(service)) => {
            let near = SocketAddr::new(near, port);
            let endpoint = balance::endpoint(caller.mesh, caller.source, service, near, purpose, chance)?;
            Ok(Chosen {
                endpoint,
                service: Some(service),
            })
        }
        Some(Found::Workload(workload)) => {
            let endpoint = Endpoint {
                workload,
                address: balance::place(workload, Default::default(), near, chance).address(),
                port,
            };
            let elsewhere = purpose != Purpose::Gateway && workload.network != caller.source.network;
            if endpoint.address.is_none() && !elsewhere {
                return Err(balance::unresolved(workload));
            }
            Ok(Chosen {
                endpoint,
                service: None,
            })
        }
        None => Err(NoRoute::UnknownGateway(gateway.clone())),
    }
}

/// Whether the caller is itself one of a waypoint's workloads: by identity, and by the address that it calls from, since others
/// may have the same service account.
pub(super) fn is_caller(caller: &Caller<'_>, waypoint: &GatewayAddress) -> bool {
    let is_it = |workload: &Arc<Workload>| {
        workload.network == caller.source.network
            && workload.has_address(caller.client)
            && (
                &workload.trust_domain,
                &workload.namespace,
                &workload.service_account,
            ) == (
                &caller.source.trust_domain,
                &caller.source.namespace,
                &caller.source.service_account,
            )
    };
    match find(caller, waypoint) {
        Some(Found::Service(service)) => caller.mesh.endpoints(&service.host).iter().any(is_it),
        Some(Found::Workload(workload)) => is_it(workload),
        None => false,
    }
}

fn find<'a>(caller: &Caller<'a>, gateway: &GatewayAddress) -> Option<Found<'a>> {
    let mesh: &'a Mesh = caller.mesh;
    match &gateway.destination {
        GatewayDestination::Address(at) => mesh
            .service_at(&at.network, at.address, &caller.source.namespace)
            .map(Found::Service)
            .or_else(|| mesh.workload_at(&at.network, at.address).map(Found::Workload)),
        GatewayDestination::Hostname(host) => mesh
            .service(host)
            .map(Found::Service)
            .or_else(|| mesh.workload_named(host).map(Found::Workload)),
    }
}
