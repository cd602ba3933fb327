//! The admin port of a node with 500 pods and 4,000 connections, as far as the dashboard asks it.

use std::{
    io::{self, BufRead as _, BufReader, Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    time::{Duration, SystemTime},
};

use redirector::telemetry::logs::timestamp;
use serde_json::{Value, json};

/// A pod that nobody should name so.
pub const HOSTILE: &str = "<img src=x onerror=window.broken=1>";

const PODS: usize = 500;
const CONNECTIONS: usize = 4_000;
const NAMES: [&str; 6] = ["cart", "checkout", "web", "payments", "search", "inventory"];

/// Answers one request.
pub fn serve(mut stream: TcpStream, _: SocketAddr) -> io::Result<()> {
    let mut lines = BufReader::new(&stream).take(64 << 10).lines();
    let first = lines.next().transpose()?.unwrap_or_default();
    let target = first.split(' ').nth(1).unwrap_or_default().to_owned();
    for line in lines {
        if line?.is_empty() {
            break;
        }
    }
    let (path, query) = target.split_once('?').unwrap_or((&target, ""));
    let (status, kind, body) = match path {
        "/" => ("200 OK", "text/html", page()),
        "/dashboard.css" => (
            "200 OK",
            "text/css",
            include_str!("../../../redirector/src/admin/dashboard/dashboard.css").to_owned(),
        ),
        "/dashboard.js" => (
            "200 OK",
            "text/javascript",
            include_str!("../../../redirector/src/admin/dashboard/dashboard.js").to_owned(),
        ),
        "/pods" => ("200 OK", "application/json", pods().to_string()),
        "/connections" => ("200 OK", "application/json", connections().to_string()),
        "/flows" => ("200 OK", "application/json", flows(query).to_string()),
        "/certificates" => ("200 OK", "application/json", certificates().to_string()),
        "/metrics" => ("200 OK", "text/plain", metrics()),
        _ => ("404 Not Found", "text/plain", String::new()),
    };
    write!(
        stream,
        "HTTP/1.1 {status}\r\nContent-Type: {kind}; charset=utf-8\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
        body.len()
    )
}

fn page() -> String {
    let page = include_str!("../../../redirector/src/admin/dashboard/index.html");
    page.replace("<html lang", "<html data-node=\"crowd\" lang")
}

fn name(number: usize) -> String {
    format!("{}-{number}", NAMES[number % NAMES.len()])
}

fn namespace(number: usize) -> &'static str {
    if number % 2 == 1 { "shop" } else { "billing" }
}

fn pods() -> Value {
    let pod = |number: usize| {
        json!({
            "uid": format!("uid-{number}"),
            "name": if number == 11 { HOSTILE.to_owned() } else { name(number) },
            "namespace": namespace(number),
            "serviceAccount": NAMES[number % NAMES.len()],
            "netns": number,
            "netnsPath": null,
            "addresses": [format!("10.0.{}.{}", number / 250, number % 250 + 1)],
            "state": if number == 7 { "notCaptured" } else { "captured" },
            "strict": number.is_multiple_of(3),
            "error": (number == 7).then_some("cannot attach to eth0: no such device"),
        })
    };
    json!({
        "ready": false,
        "pending": ["state manager"],
        "backend": "ebpf",
        "missed": [],
        "synced": true,
        "pods": (0..PODS).map(pod).collect::<Vec<_>>(),
    })
}

fn flow(number: usize, state: &str) -> Value {
    let failed = state == "failed";
    let security = ["mutual_tls", "mutual_tls", "same_node", "plaintext"];
    json!({
        "id": number,
        "direction": if number % 2 == 1 { "inbound" } else { "outbound" },
        "started": "2026-01-05T10:11:12.345Z",
        "durationMs": number * 1_237,
        "state": state,
        "security": security[number % 4],
        "src": {"addr": format!("10.0.0.9:{}", 30_000 + number), "workload": "web-2", "namespace": "shop", "identity": null},
        "dst": {"addr": "10.0.1.4:15008", "hboneAddr": "10.0.1.4:8080", "service": "cart.shop.svc.cluster.local",
            "workload": "cart-0", "namespace": "billing", "identity": null},
        "pod": {"uid": format!("uid-{}", number % PODS), "namespace": namespace(number), "name": name(number % PODS)},
        "bytesSent": number * 7_919,
        "bytesReceived": number * 104_729,
        "protocol": "HBONE",
        "policy": (number % 2 == 1).then_some("shop/lets-web-in"),
        "responseFlags": if failed { "DENY" } else { "-" },
        "error": failed.then_some("none of the ALLOW policies matches: shop/lets-web-in"),
    })
}

fn connections() -> Value {
    let open = (0..CONNECTIONS).map(|number| flow(number, "open"));
    json!({"connections": open.collect::<Vec<_>>(), "total": CONNECTIONS})
}

fn flows(query: &str) -> Value {
    let state = |number: usize| {
        if number.is_multiple_of(9) {
            "failed"
        } else {
            "complete"
        }
    };
    let ended = (0..300).map(|number| flow(number, state(number)));
    let new = if query.contains("after=") {
        Vec::new()
    } else {
        ended.collect()
    };
    json!({"next": 300, "lost": 0, "flows": new})
}

fn certificates() -> Value {
    let ends = timestamp(SystemTime::now() + Duration::from_secs(20 * 60 * 60));
    let identity = |name: &&str| {
        let chain = json!([{"pem": "", "serialNumber": "123456789012345678901234567890",
            "validFrom": "2026-01-05T10:11:12Z", "expirationTime": ends}]);
        let (state, chain) = match *name {
            "search" => ("Unavailable: nobody answers", json!([])),
            _ => ("Available", chain),
        };
        json!({"identity": format!("spiffe://cluster.local/ns/shop/sa/{name}"), "state": state, "certChain": chain, "rootCerts": []})
    };
    json!({"certificates": NAMES.iter().map(identity).collect::<Vec<_>>(), "revocations": null})
}

fn metrics() -> String {
    let counts = |number| {
        [("egress", "captured", 2), ("egress", "own", 1), ("ingress", "captured", 0)].map(|(program, verdict, count)| {
            format!("redirector_verdicts_total{{pod=\"uid-{number}\",program=\"{program}\",verdict=\"{verdict}\",namespace=\"a}} 7\\\",program=\\\"x\",pod_name=\"p{number}\",uid=\"uid-{number}\"}} {count}\n")
        })
    };
    (0..PODS).flat_map(counts).collect()
}
