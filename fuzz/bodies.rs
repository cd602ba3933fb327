//! What each target does with its bytes: hands them to a reader of ours, and checks what comes of it. The targets of libFuzzer are
//! made of this, and so is redirector/tests/fuzz.rs, by which every run of the unit tests has a go at all of them.

use std::{
    net::{IpAddr, SocketAddr},
    sync::OnceLock,
};

use http::{HeaderMap, HeaderValue};

use redirector::{
    cni::plugin,
    discovery::{file, proto},
    mesh::{
        index::Mesh,
        pod::{Home, Local, PodInfo},
        route,
        spiffe::SpiffeId,
    },
    pods::{wire::Event, zds, zds_server},
    proxy::{
        baggage::{BAGGAGE, MAX_VALUE, Told},
        proxy_protocol,
    },
    redirect::{
        overrides::Overrides,
        rules::{Interfaces, Networks, Ports},
    },
};

/// A target: its name, which is its directory of seeds and its binary, and its body.
type Target = (&'static str, fn(&[u8]));

/// All of them.
pub(crate) const TARGETS: &[Target] = &[
    ("authority", authority),
    ("workloads", workloads),
    ("pod_event", pod_event),
    ("zds", zds_message),
    ("rules", rules),
    ("spiffe", spiffe),
    ("baggage", baggage),
    ("proxy_header", proxy_header),
    ("xds", xds),
    ("cni_plugin", cni_plugin),
];

/// Runs the target of this name.
pub(crate) fn run(name: &str, bytes: &[u8]) {
    let target = TARGETS.iter().find(|(known, _)| *known == name);
    target.expect("every binary has a body").1(bytes);
}

const MESH: &str = "
workloads:
- {uid: a, name: web-0, namespace: shop, serviceAccount: web, trustDomain: cluster.local, protocol: HBONE,
   workloadIps: [10.1.2.3, 'fd00::3'], services: {shop/web.shop.svc.cluster.local: {80: 8080, 81: 15008}}}
- {uid: b, name: db-0, namespace: shop, serviceAccount: db, trustDomain: cluster.local, protocol: TCP,
   workloadIps: [10.1.2.4], services: {}}
services:
- {name: web, namespace: shop, hostname: web.shop.svc.cluster.local, vips: [/10.9.9.9], ports: {80: 8080, 81: 15008}}
";

/// The pod `web-0` of [`MESH`].
fn with_pod(act: impl FnOnce(&Mesh, Local<'_>)) {
    static FIXTURE: OnceLock<(Mesh, PodInfo)> = OnceLock::new();
    let (mesh, info) = FIXTURE.get_or_init(|| {
        let info = PodInfo {
            uid: "a".parse().expect("a UID"),
            name: "web-0".into(),
            namespace: "shop".into(),
            service_account: "web".into(),
        };
        (file::parse(MESH, "the fixture").expect("a workload file"), info)
    });
    act(
        mesh,
        Local {
            info,
            home: &Home::default(),
        },
    );
}

/// The authority of a CONNECT: what is let in goes to this pod, and not to the proxy's own ports.
fn authority(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else {
        return;
    };
    let own = ["10.1.2.3", "fd00::3"].map(|ip| ip.parse().expect("an address"));
    for received_on in own {
        with_pod(
            |mesh, local| match route::inbound(mesh, local, received_on, text) {
                Ok(route::Upstream { port, .. }) => {
                    assert!(
                        port != 0 && ![15001, 15006, 15008].contains(&port),
                        "{text:?}: {port}"
                    );
                    if let Ok(named) = text.parse::<SocketAddr>() {
                        assert_eq!(named.ip().to_canonical(), received_on, "{text:?}");
                    }
                }
                Err(refusal) => {
                    assert!((400..600).contains(&refusal.status()), "{text:?}");
                    assert!(
                        refusal.to_string().len() < 4096,
                        "a refusal repeats no more than it must"
                    );
                }
            },
        );
    }
}

/// The workload file: read or refused, and if read, of use to a pod in it.
fn workloads(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else {
        return;
    };
    match file::parse(text, "fuzz") {
        Ok(mesh) => with_pod(|_, local| {
            for to in ["10.9.9.9:80", "10.1.2.4:5432", "[fd00::3]:80", "192.0.2.1:443"] {
                let to = to.parse().expect("an address");
                let own = [10, 1, 2, 3].into();
                let _ = route::outbound(&mesh, local, own, to, &mut |weights: u64| {
                    weights.saturating_sub(1)
                });
            }
            let own = [10, 1, 2, 3].into();
            let _ = route::inbound(&mesh, local, own, "web.shop.svc.cluster.local:80");
        }),
        Err(error) => assert!(error.to_string().contains("fuzz"), "{error}"),
    }
}

/// The event of a CNI plugin: what is read is written and read again as the same.
fn pod_event(bytes: &[u8]) {
    if let Ok(event) = Event::parse(bytes) {
        let again = Event::parse(event.to_json().as_bytes()).expect("what we write we can read");
        assert_eq!(again.to_json(), event.to_json());
        if let Some(annotations) = &event.annotations {
            let _ = Overrides::from_annotations(annotations);
        }
    }
}

/// A message of a node agent.
fn zds_message(bytes: &[u8]) {
    // A request that comes to us, and an answer.
    for checked in [zds::check(bytes), zds_server::check(bytes)] {
        if let Err(error) = checked {
            assert!(!error.is_empty());
        }
    }
}

/// The lists of the rules: what is read is written and read again as the same.
fn rules(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else {
        return;
    };
    if let Ok(list) = text.parse::<Ports>() {
        assert_eq!(list.to_string().parse().as_ref(), Ok(&list));
    }
    if let Ok(list) = text.parse::<Networks>() {
        assert_eq!(list.to_string().parse().as_ref(), Ok(&list));
    }
    if let Ok(list) = text.parse::<Interfaces>() {
        assert_eq!(list.to_string().parse().as_ref(), Ok(&list));
    }
}

/// An identity in a certificate.
fn spiffe(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else {
        return;
    };
    if let Ok(id) = text.parse::<SpiffeId>() {
        assert_eq!(id.to_string(), text);
    }
}

/// What a peer says of itself, a header a line: no more of it is taken than a name can have.
fn baggage(bytes: &[u8]) {
    let lines = bytes.split(|byte| *byte == b'\n');
    let values = lines.filter_map(|line| HeaderValue::from_bytes(line).ok());
    let headers: HeaderMap = values
        .map(|value| (http::HeaderName::from_static(BAGGAGE), value))
        .collect();
    let told = Told::by(&headers);
    for name in [told.namespace, told.workload].into_iter().flatten() {
        assert!((1..=MAX_VALUE).contains(&name.chars().count()), "{name:?}");
        assert!(!name.contains(','), "{name:?}");
    }
}

/// Two addresses and an identity: a reader of PROXY protocol finds them in the header again.
fn proxy_header(bytes: &[u8]) {
    let Some((fixed, service_account)) = bytes.split_first_chunk::<38>() else {
        return;
    };
    let address = |at: usize| {
        let octets: [u8; 16] = fixed[at..at + 16].try_into().expect("16 of them");
        let ip = IpAddr::from(octets).to_canonical();
        SocketAddr::new(ip, u16::from_be_bytes([fixed[at + 16], fixed[at + 17]]))
    };
    let (source, destination) = (address(0), address(18));
    let name = String::from_utf8_lossy(service_account);
    // The last bytes choose the namespace, so that it varies too.
    let Ok(identity) = SpiffeId::new("td", &format!("n{}", fixed[36]), &name) else {
        return;
    };
    let header = proxy_protocol::header(source, destination, &identity);
    let (head, rest) = header.split_at(16);
    assert_eq!(&head[..13], b"\r\n\r\n\0\r\nQUIT\n\x21");
    assert_eq!(usize::from(u16::from_be_bytes([head[14], head[15]])), rest.len());
    let (ips, width): (Vec<IpAddr>, usize) = match head[13] {
        0x11 => (
            rest[..8]
                .chunks(4)
                .map(|ip| <[u8; 4]>::try_from(ip).expect("4").into())
                .collect(),
            4,
        ),
        0x21 => (
            rest[..32]
                .chunks(16)
                .map(|ip| <[u8; 16]>::try_from(ip).expect("16").into())
                .collect(),
            16,
        ),
        other => panic!("family {other:#x}"),
    };
    let port = |at: usize| u16::from_be_bytes([rest[2 * width + at], rest[2 * width + at + 1]]);
    let read: Vec<_> = ips.iter().map(IpAddr::to_canonical).collect();
    assert_eq!(read, [source.ip(), destination.ip()]);
    assert_eq!((port(0), port(2)), (source.port(), destination.port()));
    let tlv = &rest[2 * width + 4..];
    if !tlv.is_empty() {
        assert_eq!(
            (tlv[0], usize::from(u16::from_be_bytes([tlv[1], tlv[2]]))),
            (0xd0, tlv.len() - 3)
        );
        assert_eq!(&tlv[3..], identity.to_string().as_bytes());
    }
}

/// A resource of the control plane; its first byte says of which kind. What is understood can be put into a mesh and taken out again.
fn xds(bytes: &[u8]) {
    let Some((kind, bytes)) = bytes.split_first() else {
        return;
    };
    let (update, problem) = proto::read(kind % 2 == 1, bytes);
    assert!(update.is_some() || problem.is_some_and(|text| text.len() < 16 * bytes.len() + 1024));
    if let Some(update) = update {
        let mut mesh = Mesh::default();
        mesh.apply(update);
        let keys: Vec<_> = mesh.keys().collect();
        assert_eq!(keys.len(), 1);
        mesh.apply(keys[0].removal());
        assert_eq!((mesh.len(), mesh.policies()), ((0, 0), 0), "{keys:?}");
    }
}

/// CNI_ARGS, CNI_NETNS and standard input of the CNI plugin, a line each but the last. Whatever they are, it answers with one JSON
/// document or, where the specification has it so, with nothing. Its configuration may name files and sockets, and these are not the
/// fuzzer's to touch: commands that would are run with others in their place, and DEL, which falls back to the agent's own, not at all.
fn cni_plugin(bytes: &[u8]) {
    let mut lines = bytes.splitn(3, |byte| *byte == b'\n');
    let (Some(arguments), Some(netns), Some(input)) = (lines.next(), lines.next(), lines.next()) else {
        return;
    };
    let run = |command: &str, mut input: &[u8]| {
        let environment = |name: &str| match name {
            "CNI_COMMAND" => Some(command.to_owned()),
            "CNI_ARGS" => Some(String::from_utf8_lossy(arguments).into_owned()),
            "CNI_NETNS" => Some(String::from_utf8_lossy(netns).into_owned()),
            _ => None,
        };
        let result = plugin::run(&environment, &mut input);
        let text = result.as_ref().unwrap_or_else(|error| error);
        if result.is_ok() && matches!(command, "STATUS" | "CHECK") {
            assert_eq!(text, "", "{command}");
            return;
        }
        let answer: serde_json::Value = serde_json::from_str(text).expect("one JSON document");
        assert!(answer.is_object(), "{command}: {text}");
        if result.is_err() {
            assert_ne!(answer["code"], 101, "a fault of ours: {text}");
        }
    };
    run("STATUS", input);
    run("VERSION", input);
    let Ok(serde_json::Value::Object(mut configuration)) = serde_json::from_slice(input) else {
        return;
    };
    configuration.remove("logFile");
    configuration.insert("agentSocket".to_owned(), "/nonexistent/cni.sock".into());
    let input = serde_json::Value::Object(configuration).to_string();
    run("ADD", input.as_bytes());
    run("CHECK", input.as_bytes());
}
