use std::{collections::BTreeMap, os::unix::net::UnixListener, thread};

use super::*;

const PREV: &str = r#"{"cniVersion":"1.0.0","interfaces":[{"name":"eth0","sandbox":"/n"}],"ips":[{"interface":0,
    "address":"10.4.1.9/24","gateway":"10.4.1.1"},{"address":"fd00::9/64"}],"dns":{"x-kept":[1,2.5]}}"#;

fn plugin(changes: &[(&str, &str)], input: &str) -> Result<String, String> {
    let mut environment = BTreeMap::from([
        ("CNI_COMMAND", "ADD"),
        ("CNI_NETNS", "/var/run/netns/x"),
        (
            "CNI_ARGS",
            "IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-0;K8S_POD_UID=u-1",
        ),
    ]);
    environment.extend(changes.iter().copied());
    run(
        &|name| environment.get(name).map(|value| (*value).to_owned()),
        &mut input.as_bytes(),
    )
}

fn conf(socket: &Path) -> String {
    format!(
        r#"{{"cniVersion":"1.0.0","name":"k8s","type":"redirector-cni","agentSocket":{socket:?},"prevResult":{PREV}}}"#
    )
}

/// An agent that answers one request with `answer`; what it was asked.
fn agent(answer: &'static str) -> (tempfile::TempDir, PathBuf, thread::JoinHandle<String>) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("cni.sock");
    let listener = UnixListener::bind(&path).unwrap();
    let task = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let mut request = String::new();
        while !request.ends_with('}') {
            let mut buffer = [0; 4096];
            let count = stream.read(&mut buffer).unwrap();
            request.push_str(std::str::from_utf8(&buffer[..count]).unwrap());
        }
        stream.write_all(answer.as_bytes()).unwrap();
        request
    });
    (directory, path, task)
}

#[test]
fn an_add_tells_the_agent_and_passes_the_result_on() {
    let (_directory, path, task) = agent("HTTP/1.0 200 OK\r\ncontent-length: 0\r\n\r\n");
    let output = plugin(&[], &conf(&path)).unwrap();
    let value = |text: &str| serde_json::from_str::<Value>(text).unwrap();
    assert_eq!(value(&output), value(PREV));
    let request = task.join().unwrap();
    let (head, body) = request.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("POST /cmdadd HTTP/1.0\r\n"), "{head}");
    let event = Event::parse(body.as_bytes()).unwrap();
    assert_eq!(event.netns.unwrap(), Path::new("/var/run/netns/x"));
    assert_eq!((event.namespace.as_str(), event.name.as_str()), ("shop", "web-0"));
    assert_eq!(event.uid.unwrap().as_str(), "u-1");
    let addresses: Vec<_> = event
        .addresses
        .iter()
        .map(|a| (a.ip.to_string(), a.prefix.unwrap()))
        .collect();
    assert_eq!(
        addresses,
        [("10.4.1.9".to_owned(), 24), ("fd00::9".to_owned(), 64)]
    );
}

#[test]
fn a_refusal_of_the_agent_fails_the_pod() {
    let (_directory, path, task) = agent("HTTP/1.1 500 Internal Server Error\r\n\r\nno such pod\n");
    let error: Value = serde_json::from_str(&plugin(&[], &conf(&path)).unwrap_err()).unwrap();
    task.join().unwrap();
    assert_eq!(error["code"], 100);
    assert_eq!(error["msg"], "the redirector's agent answers 500: no such pod");
    assert_eq!(error["cniVersion"], "1.0.0");
}

#[test]
fn what_is_wrong_is_told_with_its_code() {
    let absent = Path::new("/nonexistent/cni.sock");
    let whole = conf(absent);
    let without = |key: &str| {
        let mut value: Value = serde_json::from_str(&whole).unwrap();
        value.as_object_mut().unwrap().remove(key);
        value.to_string()
    };
    type Case<'a> = (&'a [(&'a str, &'a str)], String, u32, &'a str);
    let table: [Case<'_>; 11] = [
        (
            &[],
            whole.clone(),
            11,
            "cannot be reached at /nonexistent/cni.sock",
        ),
        (&[], "{".into(), 6, "cannot read the network configuration"),
        (&[], without("prevResult"), 7, "prevResult is missing"),
        (&[], without("cniVersion"), 1, "CNI version \"\" is not supported"),
        (&[], whole.replace("10.4.1.9/24", "10.4.1.9"), 7, "ips[0].address"),
        (&[("CNI_COMMAND", "")], whole.clone(), 4, "CNI_COMMAND is not set"),
        (
            &[("CNI_COMMAND", "DANCE")],
            whole.clone(),
            4,
            "CNI_COMMAND has the unknown value",
        ),
        (&[("CNI_NETNS", "")], whole.clone(), 4, "CNI_NETNS is not set"),
        (
            &[("CNI_ARGS", "K8S_POD_NAME=x")],
            whole.clone(),
            4,
            "CNI_ARGS has no K8S_POD_NAMESPACE",
        ),
        (
            &[("CNI_ARGS", "K8S_POD_NAME=x;K8S_POD_NAMESPACE=y;K8S_POD_UID=/")],
            whole.clone(),
            4,
            "K8S_POD_UID",
        ),
        (
            &[("CNI_COMMAND", "CHECK")],
            without("prevResult"),
            7,
            "prevResult is missing",
        ),
    ];
    for (environment, input, code, expected) in table {
        let text = plugin(environment, &input).unwrap_err();
        let error: Value = serde_json::from_str(&text).unwrap();
        assert!(
            error["code"] == code && error["msg"].as_str().unwrap().contains(expected),
            "{text}"
        );
    }
}

#[test]
fn a_delete_always_succeeds() {
    let (_directory, path, task) = agent("HTTP/1.0 500 Oops\r\n\r\nno");
    let del = ("CNI_COMMAND", "DEL");
    assert_eq!(plugin(&[del], &conf(&path)).unwrap(), "");
    assert!(task.join().unwrap().starts_with("POST /cmddel HTTP/1.0\r\n"));
    for (changes, input) in [
        (vec![del], conf(Path::new("/nonexistent/cni.sock"))),
        (vec![del], String::new()),
        (vec![del, ("CNI_ARGS", ""), ("CNI_NETNS", "")], conf(&path)),
    ] {
        assert_eq!(plugin(&changes, &input).unwrap(), "");
    }
}

#[test]
fn the_versions_are_told() {
    let output: Value = serde_json::from_str(&plugin(&[("CNI_COMMAND", "VERSION")], "").unwrap()).unwrap();
    assert!(
        output["supportedVersions"]
            .as_array()
            .unwrap()
            .contains(&json!("1.0.0"))
    );
}
