//! Configurations as real CNIs write them, with our entry and without it again.

use proptest::prelude::*;

use super::*;
use crate::cni::entry::AgentPod;

const BRIDGE: &str = include_str!("testdata/bridge.conflist");
const CALICO: &str = include_str!("testdata/calico.conflist");
const FLANNEL: &str = include_str!("testdata/flannel.conflist");
const K3S: &str = include_str!("testdata/k3s-flannel.conflist");
const CILIUM: &str = include_str!("testdata/cilium.conflist");
const KINDNET: &str = include_str!("testdata/kindnet.conflist");
const AWS: &str = include_str!("testdata/aws-vpc.conflist");

fn ours() -> Written {
    Written::new(&Entry {
        agent_socket: Some("/run/redirector/cni.sock".into()),
        exclude_namespaces: vec!["kube-system".to_owned()],
        agent_pod: Some(AgentPod {
            namespace: "mesh".to_owned(),
            name_prefix: "redirector-".to_owned(),
        }),
        ..Entry::default()
    })
}

fn with(text: &str) -> String {
    List::parse(text).unwrap().with(&ours()).unwrap()
}

fn without(text: &str) -> String {
    List::parse(text).unwrap().without()
}

fn value(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

/// Every configuration: ours is last and once, nothing else is another, and taken out again it is as it was, byte for byte.
#[test]
fn an_entry_comes_and_goes_without_a_trace() {
    for (name, text) in [
        ("bridge", BRIDGE),
        ("calico", CALICO),
        ("flannel", FLANNEL),
        ("k3s", K3S),
        ("cilium", CILIUM),
        ("kindnet", KINDNET),
        ("aws", AWS),
    ] {
        let installed = with(text);
        let mut expected = value(text);
        expected["plugins"].as_array_mut().unwrap().push(ours().value());
        assert_eq!(value(&installed), expected, "{name}");
        assert_eq!(with(&installed), installed, "{name}: a second time");
        assert_eq!(without(&installed), text, "{name}");
        let list = List::parse(&installed).unwrap();
        assert_eq!(list.ours(), Some(ours()), "{name}");
        assert!(list.check().is_ok() && !list.is_ours_alone(), "{name}");
    }
}

#[test]
fn the_text_is_laid_out_as_what_stands_before_it() {
    assert_eq!(with(BRIDGE), include_str!("testdata/bridge.golden"));
    // Written on one line, as by kindnet's template.
    let line = r#"{"cniVersion":"0.3.1","name":"n","plugins":[{"type":"a"}]}"#;
    let entry = r#"{"type":"redirector-cni","agentSocket":"/run/redirector/cni.sock","excludeNamespaces":["kube-system"],"agentPod":{"namespace":"mesh","namePrefix":"redirector-"}}"#;
    let expected = format!(r#"{{"cniVersion":"0.3.1","name":"n","plugins":[{{"type":"a"}},{entry}]}}"#);
    assert_eq!(with(line), expected);
}

#[test]
fn what_others_wrote_stays_byte_for_byte() {
    let text = "{ \"plugins\" : [ {\"type\":\"a\",\"mtu\":1.50e3,\"z\":18446744073709551616,\"b\":\"\\u00e9\"} , {\"b\":1,\"type\":\"c\",\"a\":2}\t],\n\
                \"unknown\":{\"y\":1,\"x\":[ ]}, \"cniVersion\":\"1.1.0\", \"cniVersions\":[\"1.0.0\"],\"name\":\"n\"}\n\n";
    let installed = with(text);
    assert!(installed.contains("\"mtu\":1.50e3,\"z\":18446744073709551616,\"b\":\"\\u00e9\""));
    assert_eq!(without(&installed), text);
}

#[test]
fn an_entry_of_ours_that_is_old_double_or_in_the_middle_is_replaced() {
    let old = r#"{"type":"redirector-cni","agentSocket":"/old"}"#;
    let new = serde_json::to_string(&ours()).unwrap();
    let list = |plugins: &[&str]| {
        format!(
            r#"{{"cniVersion":"1.0.0","name":"n","plugins":[{}]}}"#,
            plugins.join(", ")
        )
    };
    let (a, b) = (r#"{"type":"a"}"#, r#"{"type":"b"}"#);
    for plugins in [
        &[a, b, old][..],
        &[a, old, b],
        &[old, a, b],
        &[a, b, old, &new],
        &[old, a, old, b, old],
        &[a, &new, b],
    ] {
        let text = list(plugins);
        assert_eq!(with(&text), list(&[a, b, &new]), "{text}");
        assert_eq!(without(&text), list(&[a, b]), "{text}");
    }
    for plugins in [&[a, old][..], &[old, a], &[old, old, a, old]] {
        let text = list(plugins);
        assert_eq!(value(&with(&text)), value(&list(&[a, &new])), "{text}");
        assert_eq!(without(&text), list(&[a]), "{text}");
    }
}

#[test]
fn one_plugin_becomes_a_list_of_it_and_ours() {
    let conf = "{\n  \"cniVersion\": \"0.3.1\",\n  \"name\": \"lo-net\",\n  \"type\": \"bridge\",\n  \"mtu\": 1.5e3\n}\n";
    let list = of_conf(conf, &ours()).unwrap();
    assert_eq!(list, include_str!("testdata/conf.golden"));
    let parsed = List::parse(&list).unwrap();
    assert!(parsed.check().is_ok() && parsed.is_made_of(conf));
    assert!(!parsed.is_made_of(&conf.replace("1.5e3", "9000")));
    assert!(List::parse(&with(&list)).unwrap().is_made_of(conf));
}

#[test]
fn what_a_runtime_cannot_use_is_told() {
    for (text, expected) in [
        ("", "is no list"),
        ("{", "is no list"),
        ("[]", "is no list"),
        ("{}{}", "is no list"),
        (r#"{"name":"n","cniVersion":"1.0.0"}"#, "has no plugins"),
        (r#"{"name":"n","plugins":{}}"#, "is no list"),
        (r#"{"name":"n","plugins":[1]}"#, "is no configuration"),
        (r#"{"name":"n","plugins":[{}]}"#, "without a type"),
        (r#"{"name":"n","plugins":[]}"#, "has no plugin"),
        (r#"{"plugins":[{"type":"a"}]}"#, "has no name"),
        (r#"{"name":7,"plugins":[{"type":"a"}]}"#, "has no name"),
        (
            r#"{"name":"n","cniVersion":1,"plugins":[{"type":"a"}]}"#,
            "no text",
        ),
        (
            r#"{"name":"n","plugins":[{"type":"redirector-cni"}]}"#,
            "has no plugin",
        ),
    ] {
        let error = List::parse(text).and_then(|list| list.check()).unwrap_err();
        assert!(error.to_string().contains(expected), "{text}: {error}");
    }
    for (text, expected) in [
        ("nonsense", "is no configuration"),
        (r#"{"name":"n"}"#, "without a type"),
        (r#"{"type":"a"}"#, "has no name"),
        (BRIDGE, "without a type"),
    ] {
        let error = check_conf(text).unwrap_err();
        assert!(error.to_string().contains(expected), "{text}: {error}");
    }
    assert_eq!(check_conf(r#"{"name":"n","Type":"a"}"#), Ok(false));
    assert_eq!(check_conf(r#"{"name":"n","type":"redirector-cni"}"#), Ok(true));
}

#[test]
fn versions_without_chaining_are_refused_and_none_is_changed() {
    for (version, is_good) in [
        ("0.2.0", false),
        ("0.3.0", true),
        ("0.3.1", true),
        ("0.4.0", true),
        ("1.0.0", true),
        ("1.1.0", true),
        ("2.0.0", false),
        ("x", false),
        ("", false),
    ] {
        let text = format!(r#"{{"cniVersion":"{version}","name":"n","plugins":[{{"type":"a"}}]}}"#);
        let list = List::parse(&text).unwrap().with(&ours());
        assert_eq!(list.is_ok(), is_good, "{version}: {list:?}");
        let conf = format!(r#"{{"cniVersion":"{version}","name":"n","type":"a"}}"#);
        let conf = of_conf(&conf, &ours());
        assert_eq!(conf.is_ok(), is_good, "{version}: {conf:?}");
        for text in list.into_iter().chain(conf) {
            assert_eq!(value(&text)["cniVersion"], version);
        }
    }
    let text = r#"{"name":"n","plugins":[{"type":"a"}]}"#;
    let error = List::parse(text).unwrap().with(&ours()).unwrap_err();
    assert!(error.to_string().contains("write one from 0.3.0 on"), "{error}");
}

#[test]
fn the_form_goes_by_the_name() {
    for (name, expected) in [
        ("a.conflist", Some(Form::List)),
        ("a.conf", Some(Form::Conf)),
        ("a.json", Some(Form::Conf)),
        ("a.conf.bak", None),
        ("a.conflist.cilium_bak", None),
        (".a.redirector-tmp-1-0", None),
        ("conf", None),
        ("", None),
    ] {
        assert_eq!(form(name), expected, "{name}");
    }
}

#[test]
fn a_file_of_our_own_can_be_used_by_others() {
    let entry = ours().entry;
    assert_eq!(check_conf(&alone(Form::Conf, &entry)), Ok(true));
    let list = alone(Form::List, &entry);
    assert!(List::parse(&list).unwrap().is_ours_alone());
}

/// A JSON text with spaces where there may be some.
fn spaced(value: &Value, space: &str) -> String {
    let each = |parts: Vec<String>, open: char, close: char| {
        format!(
            "{open}{space}{}{space}{close}",
            parts.join(&format!("{space},{space}"))
        )
    };
    match value {
        Value::Object(map) => {
            let pair = |(key, value): (&String, &Value)| {
                format!(
                    "{}{space}:{space}{}",
                    Value::from(key.as_str()),
                    spaced(value, space)
                )
            };
            each(map.iter().map(pair).collect(), '{', '}')
        }
        Value::Array(list) => each(list.iter().map(|value| spaced(value, space)).collect(), '[', ']'),
        other => other.to_string(),
    }
}

proptest! {
    /// Whatever the plugins, their order, and the spaces between.
    #[test]
    fn ours_is_last_and_once_and_goes_without_a_trace(
        kinds in prop::collection::vec(0..3u8, 1..6),
        space in "[ \t\r\n]{0,3}",
        odd in any::<String>(),
    ) {
        let plugin = |kind: &u8| match kind {
            0 => serde_json::json!({ "type": TYPE, "agentSocket": odd }),
            1 => serde_json::json!({ "type": "a", odd.as_str(): [1, { odd.as_str(): null }] }),
            _ => serde_json::json!({ "type": odd.clone() + "b" }),
        };
        let plugins: Vec<_> = kinds.iter().map(plugin).collect();
        let whole = serde_json::json!({ "cniVersion": "1.0.0", "name": odd.clone() + "n", "plugins": plugins, "z": odd });
        let text = format!("{space}{}{space}", spaced(&whole, &space));
        let list = List::parse(&text).unwrap();
        let others: Vec<_> = plugins.iter().filter(|plugin| plugin["type"] != TYPE).cloned().collect();
        if others.is_empty() {
            prop_assert!(list.is_ours_alone() && list.with(&ours()).is_err());
            return Ok(());
        }
        let mut expected = whole.clone();
        expected["plugins"] = others.into();
        let stripped = list.without();
        prop_assert_eq!(&value(&stripped), &expected);
        expected["plugins"].as_array_mut().unwrap().push(ours().value());
        let installed = list.with(&ours()).unwrap();
        prop_assert_eq!(&value(&installed), &expected);
        prop_assert_eq!(with(&installed), &installed[..]);
        prop_assert_eq!(value(&without(&installed)), value(&stripped));
        if !kinds.contains(&0) {
            prop_assert_eq!(stripped, &text[..]);
            prop_assert_eq!(without(&installed), &text[..]);
        }
    }

    #[test]
    fn any_text_is_taken_or_refused(text in any::<String>(), json in "[\\[\\]{}\":,a-z0-9 ]{0,40}") {
        for text in [text, json.clone(), format!(r#"{{"name":"n","cniVersion":"1.0.0","plugins":[{json}]}}"#)] {
            let _ = List::parse(&text).map(|list| (list.check(), list.with(&ours()), list.without()));
            let _ = (check_conf(&text), of_conf(&text, &ours()));
        }
    }
}
