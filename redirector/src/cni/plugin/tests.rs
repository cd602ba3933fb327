use std::{
    collections::BTreeMap,
    fs,
    io::{self, Write},
    os::unix::net::UnixListener,
    path::Path,
    thread,
};

use serde_json::Value;

use super::*;
use crate::pods::wire::Event;

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
    let task = thread::spawn(move || request(&listener, answer));
    (directory, path, task)
}

/// Takes one request, and answers.
fn request(listener: &UnixListener, answer: &str) -> String {
    let (mut stream, _) = listener.accept().unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let mut request = String::new();
    while !request.ends_with(['}', ']']) {
        let mut buffer = [0; 4096];
        let count = stream.read(&mut buffer).unwrap();
        assert_ne!(count, 0, "{request}");
        request.push_str(std::str::from_utf8(&buffer[..count]).unwrap());
    }
    // Who has only told something has not waited.
    let _ = stream.write_all(answer.as_bytes());
    request
}

fn value(text: &str) -> Value {
    serde_json::from_str(text).unwrap()
}

/// The configuration, changed.
fn conf_with(socket: &Path, changes: &[(&str, Value)]) -> String {
    let mut conf = value(&conf(socket));
    for (key, value) in changes {
        conf[*key] = value.clone();
    }
    conf.to_string()
}

const OK: &str = "HTTP/1.0 200 OK\r\ncontent-length: 0\r\n\r\n";
const ABSENT: &str = "/nonexistent/cni.sock";

#[test]
fn an_add_tells_the_agent_and_passes_the_result_on() {
    let (_directory, path, task) = agent(OK);
    let output = plugin(&[], &conf(&path)).unwrap();
    assert_eq!(output, PREV, "it is not even written anew");
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
    let error = value(&plugin(&[], &conf(&path)).unwrap_err());
    task.join().unwrap();
    assert_eq!(error["code"], 11);
    assert_eq!(error["msg"], "the redirector's agent answers 500: no such pod");
    assert_eq!(error["cniVersion"], "1.0.0");
}

#[test]
fn an_agent_that_hangs_up_is_away() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("cni.sock");
    let listener = UnixListener::bind(&path).unwrap();
    let task = thread::spawn(move || drop(listener.accept().unwrap()));
    let error = value(&plugin(&[], &conf(&path)).unwrap_err());
    task.join().unwrap();
    assert_eq!(error["code"], 11, "{error}");
    // And one that has ended, whose socket is still there.
    let error = value(&plugin(&[], &conf(&path)).unwrap_err());
    assert_eq!(error["code"], 11, "{error}");
    assert!(error["details"].as_str().unwrap().contains("refused"), "{error}");
}

#[test]
fn an_agent_that_does_not_answer_is_not_waited_for() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("cni.sock");
    let _listener = UnixListener::bind(&path).unwrap();
    let error = agent::post(&path, "/cmdadd", "{}", Duration::from_millis(50)).unwrap_err();
    assert_eq!(error.code(), 11);
    assert!(
        Chain(&error).to_string().ends_with("does not answer in time"),
        "{error:?}"
    );
    // Nor by a log, whether or not there is room for it.
    for _ in 0..10_000 {
        if agent::tell(&path, "/log", &"x".repeat(1 << 20)).is_err() {
            return;
        }
    }
    panic!("a queue without end");
}

#[test]
fn some_pods_pass_through_and_nobody_is_told() {
    let shop = conf_with(
        Path::new(ABSENT),
        &[("excludeNamespaces", json!(["kube-system", "shop"]))],
    );
    let own = |namespace: &str, prefix: &str| {
        let pod = json!({"namespace": namespace, "namePrefix": prefix});
        conf_with(Path::new(ABSENT), &[("agentPod", pod)])
    };
    type Case<'a> = (&'a str, String, bool);
    let args = "IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-0";
    let table: [Case<'_>; 9] = [
        (args, conf(Path::new(ABSENT)), false),
        (args, shop, true),
        (
            args,
            conf_with(
                Path::new(ABSENT),
                &[("excludeNamespaces", json!(["sho", "shopping"]))],
            ),
            false,
        ),
        (args, own("shop", "web-"), true),
        (args, own("shop", "eb-"), false),
        (args, own("other", "web-"), false),
        // No pod of Kubernetes.
        ("", conf(Path::new(ABSENT)), true),
        ("IgnoreUnknown=1", conf(Path::new(ABSENT)), true),
        ("K8S_POD_NAMESPACE=;K8S_POD_NAME=", conf(Path::new(ABSENT)), true),
    ];
    for (args, input, passes) in table {
        let result = plugin(&[("CNI_ARGS", args)], &input);
        match passes {
            true => assert_eq!(value(&result.unwrap()), value(PREV), "{args} {input}"),
            false => assert_eq!(value(&result.unwrap_err())["code"], 11, "{args} {input}"),
        }
        let check = plugin(&[("CNI_ARGS", args), ("CNI_COMMAND", "CHECK")], &input);
        assert_eq!(check.unwrap(), "");
    }
}

#[test]
fn without_a_result_before_the_addresses_are_unknown_and_the_result_is_empty() {
    let (_directory, path, task) = agent(OK);
    let mut alone = value(&conf(&path));
    alone.as_object_mut().unwrap().remove("prevResult");
    let output = plugin(&[], &alone.to_string()).unwrap();
    assert_eq!(value(&output), json!({"cniVersion": "1.0.0"}));
    let request = task.join().unwrap();
    let body = value(request.split_once("\r\n\r\n").unwrap().1);
    assert_eq!(body["IPs"], json!([]));
    assert_eq!(body["Netns"], "/var/run/netns/x");
}

#[test]
fn the_result_is_of_the_version_asked_for() {
    for version in VERSIONS {
        let (_directory, path, task) = agent(OK);
        let input = conf_with(&path, &[("cniVersion", version.into())]);
        let mut expected = value(PREV);
        expected["cniVersion"] = version.into();
        assert_eq!(value(&plugin(&[], &input).unwrap()), expected);
        task.join().unwrap();
    }
}

#[test]
fn a_check_fails_by_the_agents_word_alone() {
    let check = ("CNI_COMMAND", "CHECK");
    for (answer, fails) in [
        (OK, false),
        ("HTTP/1.0 409 Conflict\r\n\r\nno device\n", true),
        // An agent that does not know the question, or itself is in trouble.
        ("HTTP/1.0 404 Not Found\r\n\r\nwhat?", false),
        ("HTTP/1.0 500 Oops\r\n\r\n", false),
    ] {
        let (_directory, path, task) = agent(answer);
        let result = plugin(&[check], &conf(&path));
        assert!(task.join().unwrap().starts_with("POST /cmdcheck HTTP/1.0\r\n"));
        match result {
            Ok(output) => assert!(output.is_empty() && !fails, "{answer}"),
            Err(error) => {
                let error = value(&error);
                assert!(fails && error["code"] == 100, "{answer}: {error}");
                assert!(error["msg"].as_str().unwrap().ends_with(": no device"), "{error}");
            }
        }
    }
    assert_eq!(plugin(&[check], &conf(Path::new(ABSENT))).unwrap(), "");
}

#[test]
fn the_status_is_that_of_the_configuration_alone() {
    let status = |input: &str| plugin(&[("CNI_COMMAND", "STATUS"), ("CNI_ARGS", "")], input);
    assert_eq!(status(&conf(Path::new(ABSENT))).unwrap(), "");
    let long = format!("/{}", "x".repeat(200));
    for (input, code) in [
        ("{".to_owned(), 6),
        (conf(Path::new("cni.sock")), 7),
        (conf(Path::new(&long)), 7),
        (conf_with(Path::new(ABSENT), &[("cniVersion", "9.0.0".into())]), 1),
        (
            conf_with(Path::new(ABSENT), &[("excludeNamespaces", "shop".into())]),
            6,
        ),
    ] {
        let error = value(&status(&input).unwrap_err());
        assert_eq!(error["code"], code, "{input}: {error}");
    }
    assert_eq!(plugin(&[("CNI_COMMAND", "GC")], "{").unwrap(), "");
}

#[test]
fn what_is_wrong_is_told_with_its_code() {
    let whole = conf(Path::new(ABSENT));
    let without = |key: &str| {
        let mut value = value(&whole);
        value.as_object_mut().unwrap().remove(key);
        value.to_string()
    };
    type Case<'a> = (&'a [(&'a str, &'a str)], String, u32, &'a str);
    let table: [Case<'_>; 14] = [
        (
            &[],
            whole.clone(),
            11,
            "cannot be reached at /nonexistent/cni.sock",
        ),
        (&[], "{".into(), 6, "cannot read the network configuration"),
        (&[], String::new(), 6, "cannot read the network configuration"),
        (&[], " ".repeat(2 << 20), 5, "cannot read standard input"),
        (&[], without("cniVersion"), 1, "CNI version \"\" is not supported"),
        (&[], whole.replace("10.4.1.9/24", "10.4.1.9"), 7, "ips[0].address"),
        (
            &[],
            conf_with(Path::new(ABSENT), &[("prevResult", json!([]))]),
            7,
            "prevResult in the network configuration is not an object",
        ),
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
            "and no K8S_POD_NAMESPACE",
        ),
        (
            &[("CNI_ARGS", "K8S_POD_NAMESPACE=x")],
            whole.clone(),
            4,
            "and no K8S_POD_NAME",
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
        let error = value(&text);
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
        (vec![del], conf(Path::new(ABSENT))),
        (vec![del], String::new()),
        (vec![del], " ".repeat(2 << 20)),
        (vec![del, ("CNI_ARGS", ""), ("CNI_NETNS", "")], conf(&path)),
        (vec![del, ("CNI_ARGS", "K8S_POD_NAME=x")], conf(&path)),
    ] {
        assert_eq!(plugin(&changes, &input).unwrap(), "");
    }
}

#[test]
fn a_delete_tells_the_agent_also_without_namespace_and_result() {
    let (_directory, path, task) = agent(OK);
    let mut input = value(&conf(&path));
    input.as_object_mut().unwrap().remove("prevResult");
    let changes = [("CNI_COMMAND", "DEL"), ("CNI_NETNS", "")];
    assert_eq!(plugin(&changes, &input.to_string()).unwrap(), "");
    let request = task.join().unwrap();
    let event = Event::parse(request.split_once("\r\n\r\n").unwrap().1.as_bytes()).unwrap();
    assert_eq!(event.uid.unwrap().as_str(), "u-1");
    assert_eq!(event.netns, None);
}

#[test]
fn a_panic_is_one_error_and_never_keeps_a_pod_from_going() {
    struct Broken;
    impl Read for Broken {
        fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
            panic!("no bytes today")
        }
    }
    let call = |command: &'static str| {
        run(
            &|name| (name == "CNI_COMMAND").then(|| command.to_owned()),
            &mut Broken,
        )
    };
    let error = value(&call("ADD").unwrap_err());
    assert_eq!(error["code"], 101);
    assert_eq!(error["msg"], "internal fault of the plugin: no bytes today");
    assert_eq!(call("DEL").unwrap(), "");
}

#[test]
fn what_happens_is_told_to_the_file_and_the_agent() {
    let directory = tempfile::tempdir().unwrap();
    let (path, file) = (
        directory.path().join("cni.sock"),
        directory.path().join("plugin.log"),
    );
    let listener = UnixListener::bind(&path).unwrap();
    let input = conf_with(&path, &[("logFile", json!(file))]);
    let task = thread::spawn(move || {
        let refusal = request(&listener, "HTTP/1.0 500 Oops\r\n\r\nno room\n");
        (refusal, request(&listener, OK))
    });
    plugin(&[("CNI_CONTAINERID", "c-1")], &input).unwrap_err();
    let (refusal, log) = task.join().unwrap();
    assert!(refusal.starts_with("POST /cmdadd "));
    let (head, body) = log.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("POST /log HTTP/1.0\r\n"), "{head}");
    let records: Vec<String> = serde_json::from_str(body).unwrap();
    let lines = fs::read_to_string(&file).unwrap();
    assert_eq!(lines.lines().collect::<Vec<_>>(), records);
    let record = value(&records[0]);
    for (key, expected) in [
        ("level", "error"),
        ("msg", "the redirector's agent answers 500: no room"),
        ("command", "ADD"),
        ("namespace", "shop"),
        ("pod", "web-0"),
        ("container", "c-1"),
        ("netns", "/var/run/netns/x"),
        ("code", "11"),
    ] {
        assert_eq!(record[key], expected, "{record}");
    }
}

#[test]
fn the_versions_are_told() {
    for (input, expected) in [
        ("", "1.2.0"),
        (r#"{"cniVersion":"0.4.0"}"#, "0.4.0"),
        (r#"{"cniVersion":"9.0.0"}"#, "1.2.0"),
    ] {
        let output = value(&plugin(&[("CNI_COMMAND", "VERSION")], input).unwrap());
        assert_eq!(output["cniVersion"], expected);
        assert_eq!(output["supportedVersions"], json!(VERSIONS));
    }
}
