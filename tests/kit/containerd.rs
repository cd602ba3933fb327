//! A container runtime in the node: the real containerd and runc with Debian's CNI plugins, and ours chained behind them.
//!
//! It is in the node's network namespace, in a mount namespace of its own, where /run and /var/lib are empty, and in cgroups of its own.
//! [`Containerd::mounts`] is where an agent must be to find the pods' namespaces. Whatever state a test leaves it in, all of it
//! ends when it is dropped: the pods first, then containerd, then what is still in the cgroups.

use std::{
    fs,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::Signal;
use redirector::cni::entry::{AgentPod, Entry, TYPE};
use serde_json::{Value, json};
use tokio::{runtime::Runtime, time::timeout};
use tonic::{
    Response, Status,
    transport::{Channel, Endpoint},
};

use self::cgroups::PodCgroups;
use crate::{
    agent,
    cgroup::Cgroup,
    netns::Namespace,
    node::{Host, Node},
    process::{self, Process, command},
    proto::cri::{
        ListPodSandboxRequest, PodSandboxConfig, PodSandboxMetadata, PodSandboxState,
        PodSandboxStatusRequest, RemovePodSandboxRequest, RunPodSandboxRequest, StatusRequest,
        StopPodSandboxRequest, runtime_service_client::RuntimeServiceClient,
    },
    wait,
};

mod cgroups;
mod image;

/// Kubernetes namespace whose pods the plugin lets through.
pub const EXCLUDED: &str = "kube-system";

/// Kubernetes namespace of the agent's own pods, and what their names begin with.
pub const AGENT_POD: (&str, &str) = ("redirector-system", "redirector-");

/// Where Debian's package has the CNI plugins.
const PLUGINS: &str = "/usr/lib/cni";

/// Longest call: a pod on a busy machine, and the plugin waiting for an agent.
const CALL_DEADLINE: Duration = Duration::from_secs(90);

/// Longest time in which containerd starts or ends.
const DEADLINE: Duration = Duration::from_secs(60);

/// The private places, and a process that keeps them while others come and go.
const HOLD: &str = "mount -t tmpfs none /run && mount -t tmpfs none /var/lib && mkdir /run/netns && echo held && exec sleep infinity";

type Client = RuntimeServiceClient<Channel>;

/// A runtime that makes pods.
#[derive(Debug)]
pub struct Containerd {
    directory: PathBuf,
    process: Option<Process>,
    runtime: Runtime,
    client: Client,
    pods: PodCgroups,
    cgroup: Cgroup,
    holder: Process,
}

/// A pod of it.
#[derive(Debug)]
pub struct Sandbox {
    /// What containerd calls it.
    pub id: String,
    /// Kubernetes UID.
    pub uid: String,
    /// Its namespace and addresses.
    pub host: Host,
}

impl Containerd {
    /// Starts it in a node, and waits until it takes pods.
    ///
    /// # Panics
    /// When it does not.
    pub fn start(node: &Node) -> Self {
        Self::create(node).unwrap_or_else(|error| panic!("starting containerd: {error:#}"))
    }

    fn create(node: &Node) -> Result<Self> {
        cgroups::sweep();
        let directory = node.directory().join("containerd");
        for part in ["bin", "net.d"] {
            fs::create_dir_all(directory.join(part))?;
        }
        let mut unshare = command(&node.host.ns, "unshare");
        unshare.args(["--mount", "--propagation", "private", "sh", "-c", HOLD]);
        let holder = Process::start(&mut unshare, &directory.join("mounts.log"))?;
        wait::within(DEADLINE, "a mount namespace", || {
            holder.output().contains("held").then_some(())
        });
        let socket = directory.join("containerd.sock");
        let runtime = Runtime::new()?;
        // It is connected to when it is called, and anew when containerd has come back.
        let channel = runtime.block_on(async {
            Ok::<_, anyhow::Error>(Endpoint::new(format!("unix://{}", socket.display()))?.connect_lazy())
        })?;
        let mut containerd = Self {
            process: None,
            runtime,
            client: Client::new(channel),
            pods: PodCgroups::new(),
            cgroup: Cgroup::new(),
            holder,
            directory,
        };
        containerd.configure(node.directory())?;
        containerd.launch(node)?;
        containerd.import_image(node)?;
        Ok(containerd)
    }

    fn configure(&self, agent: &Path) -> Result<()> {
        let ours = agent::binary().context("there is no redirector binary: cargo xtask test builds it")?;
        let ours = ours.with_file_name(TYPE);
        ensure!(ours.is_file(), "{} is missing", ours.display());
        let plugins = ["bridge", "host-local", "loopback"].map(|name| Path::new(PLUGINS).join(name));
        for plugin in plugins.iter().chain([&ours]) {
            let name = plugin.file_name().context("it has one")?;
            let link = self.directory.join("bin").join(name);
            std::os::unix::fs::symlink(plugin, &link)
                .with_context(|| format!("making {}", link.display()))?;
        }
        let (namespace, name_prefix) = AGENT_POD;
        let entry = Entry {
            agent_socket: Some(agent.join("cni.sock")),
            exclude_namespaces: vec![EXCLUDED.to_owned()],
            agent_pod: Some(AgentPod {
                namespace: namespace.to_owned(),
                name_prefix: name_prefix.to_owned(),
            }),
            log_file: Some(self.plugin_log_file()),
            log_level: None,
        };
        let mut entry = serde_json::to_value(entry)?;
        entry["type"] = TYPE.into();
        let list = json!({"cniVersion": "1.0.0", "name": "pods", "plugins": [self.bridge(), entry]});
        fs::write(self.directory.join("net.d/10-pods.conflist"), list.to_string())?;
        fs::write(self.directory.join("config.toml"), self.config())?;
        Ok(())
    }

    /// Pods are on the node's bridge, as those that the kit makes, at addresses from .200.1 and c8:1 on.
    fn bridge(&self) -> Value {
        json!({
            "type": "bridge",
            "bridge": "br0",
            "ipam": {
                "type": "host-local",
                "dataDir": self.directory.join("ipam"),
                "ranges": [
                    [{"subnet": "10.77.0.0/16", "rangeStart": "10.77.200.1", "rangeEnd": "10.77.200.254", "gateway": "10.77.0.1"}],
                    [{"subnet": "fd77::/64", "rangeStart": "fd77::c8:1", "rangeEnd": "fd77::c8:fe", "gateway": "fd77::1"}],
                ],
                "routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}],
            },
        })
    }

    fn config(&self) -> String {
        let at = |file: &str| self.directory.join(file).display().to_string();
        let (root, state, socket, opt) = (at("root"), at("state"), at("containerd.sock"), at("opt"));
        let (bin, conf, image) = (at("bin"), at("net.d"), image::NAME);
        let disabled = ["aufs", "btrfs", "devmapper", "zfs"]
            .map(|name| format!(r#""io.containerd.snapshotter.v1.{name}""#))
            .join(", ");
        format!(
            r#"version = 2
root = "{root}"
state = "{state}"
disabled_plugins = [{disabled}]
[grpc]
  address = "{socket}"
[plugins."io.containerd.internal.v1.opt"]
  path = "{opt}"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{image}"
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{bin}"
    conf_dir = "{conf}"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        SystemdCgroup = false
"#
        )
    }

    /// A command in the node and in the runtime's mount namespace.
    fn command(&self, node: &Node, program: &str) -> Command {
        let mut command = command(&node.host.ns, "nsenter");
        command
            .arg(format!("--mount={}", self.mounts().display()))
            .args(["--", program]);
        command
    }

    fn launch(&mut self, node: &Node) -> Result<()> {
        let mut containerd = self.command(node, "containerd");
        containerd.arg("--config").arg(self.directory.join("config.toml"));
        let mut containerd = self.cgroup.command(&containerd);
        containerd.stdin(Stdio::null());
        let log = self.directory.join("containerd.log");
        self.process = Some(Process::start(&mut containerd, &log)?);
        wait::within(DEADLINE, "containerd with its network", || {
            let ended = self.process.as_mut().and_then(Process::ended);
            assert!(
                ended.is_none(),
                "containerd has ended: {}",
                fs::read_to_string(&log).unwrap_or_default()
            );
            self.is_ready().then_some(())
        });
        Ok(())
    }

    fn is_ready(&self) -> bool {
        let status = self.call(async |mut client| client.status(StatusRequest::default()).await);
        let conditions = status
            .ok()
            .and_then(|status| status.status)
            .map(|status| status.conditions)
            .unwrap_or_default();
        !conditions.is_empty() && conditions.iter().all(|condition| condition.status)
    }

    fn import_image(&self, node: &Node) -> Result<()> {
        let image = image::make(&self.directory)?;
        let mut ctr = self.command(node, "ctr");
        ctr.arg("--address").arg(self.directory.join("containerd.sock"));
        ctr.args(["--namespace", "k8s.io", "images", "import"])
            .arg(&image);
        let (status, text) = process::output(&mut ctr, DEADLINE);
        ensure!(status.success(), "importing the image: {text}");
        Ok(())
    }

    /// The mount namespace in which the pods' network namespaces have names.
    pub fn mounts(&self) -> PathBuf {
        format!("/proc/{}/ns/mnt", self.holder.pid()).into()
    }

    /// A path of that mount namespace, as one of ours.
    fn inside(&self, path: &str) -> PathBuf {
        format!("/proc/{}/root{path}", self.holder.pid()).into()
    }

    /// Where the plugin writes its log.
    pub fn plugin_log_file(&self) -> PathBuf {
        self.directory.join("plugin.log")
    }

    /// The records of the plugin's log.
    ///
    /// # Panics
    /// When a line is no record.
    pub fn plugin_log(&self) -> Vec<Value> {
        let text = fs::read_to_string(self.plugin_log_file()).unwrap_or_default();
        let parse = |line: &str| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"));
        text.lines().map(parse).collect()
    }

    fn call<T>(&self, call: impl AsyncFnOnce(Client) -> Result<Response<T>, Status>) -> Result<T> {
        let client = self.client.clone();
        let answer = self
            .runtime
            .block_on(async { timeout(CALL_DEADLINE, call(client)).await });
        match answer.with_context(|| format!("no answer in {CALL_DEADLINE:?}"))? {
            Ok(answer) => Ok(answer.into_inner()),
            Err(status) => bail!("{}", status.message()),
        }
    }

    /// Makes a pod as kubelet does: a sandbox, and its network.
    ///
    /// # Errors
    /// What containerd says.
    pub fn run(&self, namespace: &str, name: &str) -> Result<Sandbox> {
        let uid = format!("{}-{name}", self.pods.name());
        let config = PodSandboxConfig {
            metadata: Some(PodSandboxMetadata {
                name: name.to_owned(),
                uid: uid.clone(),
                namespace: namespace.to_owned(),
                attempt: 0,
            }),
            hostname: name.to_owned(),
            log_directory: self.directory.join("logs").display().to_string(),
            labels: Default::default(),
            linux: Some(self.pods.config()),
        };
        let request = RunPodSandboxRequest { config: Some(config) };
        let id = self
            .call(async |mut client| client.run_pod_sandbox(request).await)?
            .pod_sandbox_id;
        let status = self.call(async |mut client| {
            let request = PodSandboxStatusRequest {
                pod_sandbox_id: id.clone(),
                verbose: true,
            };
            client.pod_sandbox_status(request).await
        })?;
        let info: Value = serde_json::from_str(status.info.get("info").context("it is verbose")?)?;
        let pid = info["pid"].as_u64().context("the sandbox has a process")?;
        let network = status
            .status
            .and_then(|status| status.network)
            .context("it has a network")?;
        let ips = [network.ip]
            .into_iter()
            .chain(network.additional_ips.into_iter().map(|ip| ip.ip))
            .map(|ip| ip.parse::<IpAddr>())
            .collect::<Result<Vec<_>, _>>()?;
        let (mut v4, mut v6) = (Ipv4Addr::UNSPECIFIED, Ipv6Addr::UNSPECIFIED);
        for ip in ips {
            match ip {
                IpAddr::V4(ip) => v4 = ip,
                IpAddr::V6(ip) => v6 = ip,
            }
        }
        let ns = Namespace::of_process(u32::try_from(pid)?)?;
        Ok(Sandbox {
            id,
            uid,
            host: Host { ns, v4, v6 },
        })
    }

    /// Stops a pod, and removes it, as kubelet does.
    ///
    /// # Errors
    /// What containerd says.
    pub fn remove(&self, id: &str) -> Result<()> {
        let pod_sandbox_id = id.to_owned();
        let stop = StopPodSandboxRequest {
            pod_sandbox_id: pod_sandbox_id.clone(),
        };
        self.call(async |mut client| client.stop_pod_sandbox(stop).await)?;
        let remove = RemovePodSandboxRequest { pod_sandbox_id };
        self.call(async |mut client| client.remove_pod_sandbox(remove).await)?;
        Ok(())
    }

    /// The pods that it has, by what it calls them, and whether they are as they should be.
    ///
    /// # Errors
    /// When it does not answer.
    pub fn list(&self) -> Result<Vec<(String, bool)>> {
        let list = self.call(async |mut client| client.list_pod_sandbox(ListPodSandboxRequest {}).await)?;
        let ready = |state| state == PodSandboxState::SandboxReady as i32;
        Ok(list
            .items
            .into_iter()
            .map(|pod| (pod.id, ready(pod.state)))
            .collect())
    }

    /// What is left of pods: sandboxes, network namespaces, addresses, remembered results, devices, processes.
    ///
    /// # Panics
    /// When it cannot be found out.
    pub fn left(&self, node: &Node) -> Vec<String> {
        let mut left: Vec<String> = self
            .list()
            .expect("containerd answers")
            .into_iter()
            .map(|(id, _)| format!("sandbox {id}"))
            .collect();
        let names = |directory: PathBuf| {
            let entries = fs::read_dir(directory).into_iter().flatten().flatten();
            entries.map(|entry| entry.file_name().to_string_lossy().into_owned())
        };
        left.extend(names(self.inside("/run/netns")).map(|name| format!("namespace {name}")));
        left.extend(names(self.inside("/var/lib/cni/results")).map(|name| format!("result {name}")));
        let addresses = names(self.directory.join("ipam/pods")).filter(|name| name.parse::<IpAddr>().is_ok());
        left.extend(addresses.map(|name| format!("address {name}")));
        let devices = node.host.ns.ip_output("-o link show master br0");
        left.extend(devices.lines().map(|line| format!("device {line}")));
        left.extend(
            self.pods
                .processes()
                .into_iter()
                .map(|pid| format!("process {pid}")),
        );
        left
    }

    /// Ends containerd and starts it again; its pods go on.
    ///
    /// # Panics
    /// When it does not end or start.
    pub fn restart(&mut self, node: &Node) {
        self.end();
        self.launch(node)
            .unwrap_or_else(|error| panic!("restarting containerd: {error:#}"));
    }

    fn end(&mut self) {
        if let Some(mut process) = self.process.take() {
            process.signal(Signal::SIGTERM);
            process.wait(DEADLINE);
        }
    }

    fn remove_all(&mut self) -> Result<()> {
        if self
            .process
            .as_mut()
            .is_some_and(|process| process.ended().is_none())
        {
            for (id, _) in self.list()? {
                self.remove(&id)?;
            }
        }
        Ok(())
    }
}

impl Drop for Containerd {
    fn drop(&mut self) {
        if let Err(error) = self.remove_all() {
            eprintln!("removing the pods: {error:#}");
        }
        self.end();
        cgroups::end_all(self.cgroup.path());
        self.pods.end();
    }
}
