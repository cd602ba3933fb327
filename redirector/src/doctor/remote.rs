//! Whom the agent asks over the network: control plane, certificate authority, Kubernetes; and the clock, by which certificates are judged.

use std::{
    collections::BTreeMap,
    io,
    time::{Duration, SystemTime},
};

use futures_util::future::join_all;

use super::Check;
use crate::{
    config::{
        Config,
        planes::{Certificates, Plane},
    },
    control_plane::kubernetes::{Cluster, Kubernetes},
    sys::clock,
    telemetry::Chain,
};

/// Time for each; it has deadlines of its own, which are shorter but for Kubernetes'.
const DEADLINE: Duration = Duration::from_secs(10);

pub(super) fn checks(config: &Config) -> Vec<Check> {
    let mut checks = vec![time(SystemTime::now(), clock::is_synchronised())];
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            let hint = "raise the limit of open files";
            checks.push(Check::failed(
                "remote",
                format!("cannot ask anybody: {error}"),
                hint,
            ));
            return checks;
        }
    };
    let authority = match &config.certificates {
        Certificates::Authority(plane) => Some(plane),
        _ => None,
    };
    checks.extend(runtime.block_on(async {
        let (xds, ca, kubernetes) = tokio::join!(
            plane("remote.xds", "XDS_ADDRESS", config.xds.as_ref()),
            plane("remote.ca", "CA_ADDRESS", authority),
            join_all(clusters(config).into_values().map(api_server)),
        );
        let mut checks = vec![xds, ca];
        match kubernetes.is_empty() {
            true => checks.push(Check::not_asked(
                "remote.kubernetes",
                "these settings ask nothing of Kubernetes' API",
            )),
            false => checks.extend(kubernetes),
        }
        checks
    }));
    checks
}

/// Before this no agent of this kind was: a clock that stands there has been reset.
const EARLIEST: Duration = Duration::from_secs(1_735_689_600);

fn time(now: SystemTime, synchronised: io::Result<bool>) -> Check {
    let id = "clock";
    if now < SystemTime::UNIX_EPOCH + EARLIEST {
        return Check::failed(
            id,
            "the clock says that it is before 2025, and no certificate is good then",
            "set it, and have an NTP client keep it right",
        );
    }
    match synchronised {
        Ok(true) => Check::ok(id, "the clock is kept right"),
        Ok(false) => Check::warning(
            id,
            "nobody has told the kernel that its clock is right",
            "run an NTP client (chrony, systemd-timesyncd): certificates begin and end by this clock",
        ),
        Err(error) => Check::not_asked(id, format!("the kernel does not tell of its clock: {error}")),
    }
}

async fn plane(id: &'static str, variable: &str, plane: Option<&Plane>) -> Check {
    let Some(Plane(config)) = plane else {
        return Check::not_asked(id, format!("{variable} is not given"));
    };
    let address = &config.address;
    let reached = tokio::time::timeout(DEADLINE, config.reach()).await;
    match reached {
        Ok(Ok(())) => Check::ok(id, format!("{address} can be reached")),
        Ok(Err(error)) => Check::failed(
            id,
            format!("{address} cannot be reached: {}", Chain(&error)),
            format!(
                "look at {variable}, its roots, the name in its certificate, and the way there (DNS, routes, NetworkPolicies)"
            ),
        ),
        Err(_) => Check::failed(
            id,
            format!("{address} cannot be reached within {DEADLINE:?}"),
            "look at the way there (DNS, routes, NetworkPolicies)",
        ),
    }
}

/// Those that are asked for anything, by their names.
fn clusters(config: &Config) -> BTreeMap<String, Cluster> {
    let signer = match &config.certificates {
        Certificates::Signer(signer) => Some(&signer.cluster),
        _ => None,
    };
    let pods = config.kubernetes_pods.as_ref().map(|pods| &pods.cluster);
    let daemonset = config.daemonset.as_ref().map(|daemonset| &daemonset.cluster);
    let all = [signer, pods, daemonset].into_iter().flatten();
    all.map(|cluster| (cluster.to_string(), cluster.clone()))
        .collect()
}

async fn api_server(cluster: Cluster) -> Check {
    let id = "remote.kubernetes";
    let name = cluster.to_string();
    let kubernetes = Kubernetes::new(cluster);
    let asked = async {
        let client = kubernetes
            .client()
            .await
            .map_err(|error| Chain(&error).to_string())?;
        let version = client.apiserver_version().await;
        version.map_err(|error| Chain(&error).to_string())
    };
    match tokio::time::timeout(DEADLINE, asked).await {
        Ok(Ok(version)) => Check::ok(id, format!("{name} answers, Kubernetes {}", version.git_version)),
        Ok(Err(why)) => Check::failed(
            id,
            format!("{name} cannot be asked: {why}"),
            "look at the service account or KUBECONFIG, and the way there",
        ),
        Err(_) => Check::failed(
            id,
            format!("{name} has not answered within {DEADLINE:?}"),
            "look at the way there, and at the API server",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        config::{planes::Environment, settings::Settings},
        doctor::State,
    };

    #[test]
    fn a_clock_that_was_reset_is_told_from_one_that_nobody_keeps() {
        let now = SystemTime::UNIX_EPOCH + EARLIEST;
        let before = now - Duration::from_secs(1);
        assert_eq!(time(before, Ok(true)).state, State::Failed);
        assert_eq!(time(now, Ok(true)).state, State::Ok);
        assert_eq!(time(now, Ok(false)).state, State::Warning);
        assert_eq!(
            time(now, Err(io::ErrorKind::PermissionDenied.into())).state,
            State::NotAsked
        );
    }

    fn checks_with(variables: &[(&str, &str)]) -> Vec<Check> {
        let environment: Environment = variables
            .iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
            .collect();
        checks(&Config::load(Settings::default(), None, &environment).unwrap())
    }

    fn state(checks: &[Check], id: &str) -> State {
        checks
            .iter()
            .find(|check| check.id == id)
            .expect("it is made")
            .state
    }

    #[test]
    fn who_is_given_is_asked_and_nobody_else() {
        let checks = checks_with(&[]);
        for id in ["remote.xds", "remote.ca", "remote.kubernetes"] {
            assert_eq!(state(&checks, id), State::NotAsked, "{id}");
        }
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let checks = checks_with(&[("XDS_ADDRESS", &address)]);
        assert_eq!(state(&checks, "remote.xds"), State::Ok, "{checks:?}");
        drop(listener);
        let checks = checks_with(&[("XDS_ADDRESS", &address), ("CA_ADDRESS", "https://localhost:1")]);
        assert_eq!(state(&checks, "remote.xds"), State::Failed);
        assert_eq!(state(&checks, "remote.ca"), State::Failed);
        let checks = checks_with(&[
            ("KUBERNETES_PODS", "true"),
            ("NODE_NAME", "n"),
            ("KUBECONFIG", "/no/such/file"),
        ]);
        assert_eq!(state(&checks, "remote.kubernetes"), State::Failed, "{checks:?}");
    }
}
