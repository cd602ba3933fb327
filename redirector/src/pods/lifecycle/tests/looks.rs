//! Looks at captured pods, and what they put back.

use super::*;

#[tokio::test]
async fn a_captured_pod_is_looked_at_again_and_again() {
    let mut agent = Agent::begin(false, Duration::from_millis(10));
    agent.snapshot_sent().await.unwrap();
    agent.add(pod("a", 2)).await.unwrap();
    let fault = |status: &Status| status.pods.first().and_then(|pod| pod.error.clone());
    for (fails, expected) in [(true, Some("attach a: no")), (false, None)] {
        match fails {
            true => agent.world.fault("attach a"),
            false => agent.world.mend(),
        }
        let told = agent.status.wait_for(|status| match (fault(status), expected) {
            (Some(fault), Some(expected)) => fault.contains(expected),
            (fault, expected) => fault.is_none() && expected.is_none(),
        });
        let told = tokio::time::timeout(Duration::from_secs(10), told)
            .await
            .unwrap()
            .unwrap();
        // Its connections go on: the pod is not given up for a look that failed.
        assert_eq!(
            (told.pods[0].state, told.pods[0].impaired),
            (State::Captured, fails)
        );
    }
    // A look holds up no event, and its panic loses neither the pod nor its proxy.
    agent.world.fault("attach a!");
    let told = agent
        .status
        .wait_for(|status| fault(status).is_some_and(|fault| fault.contains("panicked")));
    tokio::time::timeout(Duration::from_secs(10), told)
        .await
        .unwrap()
        .unwrap();
    agent.world.mend();
    agent.world.log();
    agent.delete("a", None).await.unwrap();
    let log = agent.world.log();
    assert!(
        log.ends_with(&["release a".into(), "stop 0s a".into(), "detach a".into()]),
        "{log:?}"
    );
}

#[tokio::test]
async fn what_a_captured_pod_lacks_is_told_from_the_start_and_until_it_is_there() {
    let mut agent = Agent::begin(false, Duration::from_millis(10));
    agent.snapshot_sent().await.unwrap();
    *agent.world.lacks.lock().unwrap() = Some("a listener is missing");
    agent.add(pod("a", 2)).await.unwrap();
    for lacks in [Some("a listener is missing"), Some("two are"), None] {
        *agent.world.lacks.lock().unwrap() = lacks;
        let told = agent.status.wait_for(|status| {
            let [pod] = status.pods.as_slice() else {
                return false;
            };
            (pod.state, pod.impaired, pod.error.as_deref()) == (State::Captured, lacks.is_some(), lacks)
        });
        tokio::time::timeout(Duration::from_secs(10), told)
            .await
            .unwrap()
            .unwrap();
    }
    // Of rules that are refused as well, the pod is told the worse.
    *agent.world.lacks.lock().unwrap() = Some("a listener is missing");
    *agent.world.refused.lock().unwrap() = Some("2");
    let rules = serde_yaml::from_str("node: {excludeOutboundPorts: 2}").unwrap();
    agent.rules.send_replace(Arc::new(rules));
    for (lacks, impaired, expected) in [
        (Some("a listener is missing"), true, "a listener is missing"),
        (None, false, "newest rules are refused"),
    ] {
        *agent.world.lacks.lock().unwrap() = lacks;
        let told = agent.status.wait_for(|status| {
            let [pod] = status.pods.as_slice() else {
                return false;
            };
            pod.impaired == impaired && pod.error.as_ref().is_some_and(|error| error.contains(expected))
        });
        tokio::time::timeout(Duration::from_secs(10), told)
            .await
            .unwrap()
            .unwrap();
    }
}

#[tokio::test]
async fn told_to_look_it_looks_and_tries_again_at_once() {
    let mut agent = Agent::synced().await;
    agent.add(pod("a", 2)).await.unwrap();
    agent.world.fault("start b");
    let retried = PodAdd {
        on_failure: OnFailure::Retry,
        ..pod("b", 3)
    };
    agent.add(retried).await.unwrap_err();
    agent.world.mend();
    agent.world.log();
    agent.look.notify_one();
    let captured = |status: &Status| {
        status
            .pods
            .iter()
            .filter(|pod| pod.state == State::Captured)
            .count()
    };
    let both = agent.status.wait_for(|status| captured(status) == 2);
    tokio::time::timeout(Duration::from_secs(10), both)
        .await
        .unwrap()
        .unwrap();
    let log = agent.world.log();
    assert!(
        log.contains(&"attach a".into()) && log.contains(&"start b".into()),
        "{log:?}"
    );
}

#[tokio::test]
async fn a_pod_that_cannot_have_new_rules_is_kept_whole_with_those_it_has() {
    let mut agent = Agent::begin(false, Duration::from_millis(10));
    let leave_alone = |ports: &str| {
        let rules = serde_yaml::from_str(&format!("node: {{excludeOutboundPorts: {ports}}}")).unwrap();
        Arc::new(rules)
    };
    let world = Arc::clone(&agent.world);
    let put_back = async |ports: &str| {
        world.excluded.lock().unwrap().clear();
        let looks = async {
            while !world.excluded.lock().unwrap().values().any(|left| left == ports) {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(10), looks)
            .await
            .unwrap_or_else(|_| panic!("{ports} is not put in force"));
    };
    agent.rules.send_replace(leave_alone("1"));
    agent.snapshot_sent().await.unwrap();
    agent.add(pod("a", 2)).await.unwrap();
    *world.refused.lock().unwrap() = Some("2");
    agent.rules.send_replace(leave_alone("2"));
    let refused = "the pod's newest rules are refused, and those from before stay in force: cannot capture the pod's \
                   traffic: leaving 2 alone: never";
    let told = agent.status.wait_for(|status| {
        let error = status.pods.first().and_then(|pod| pod.error.as_deref());
        error == Some(refused)
    });
    let told = tokio::time::timeout(Duration::from_secs(10), told)
        .await
        .unwrap()
        .unwrap();
    assert_eq!(
        (told.pods[0].state, told.pods[0].impaired),
        (State::Captured, false)
    );
    drop(told);
    for _ in 0..3 {
        put_back("1").await;
    }
    // Once they are not refused any more, nobody has to change them for that.
    *world.refused.lock().unwrap() = None;
    put_back("2").await;
    let mended = agent.status.wait_for(|status| status.pods[0].error.is_none());
    tokio::time::timeout(Duration::from_secs(10), mended)
        .await
        .unwrap()
        .unwrap();
}

#[tokio::test]
async fn how_strict_a_pod_is_changes_live_whatever_the_backend_says_of_its_other_rules() {
    let mut agent = Agent::begin(false, Duration::from_millis(10));
    let world = Arc::clone(&agent.world);
    let rules = |text: &str| {
        Arc::new(serde_yaml::from_str(&format!("pods: [{{namespace: shop, rules: {text}}}]")).unwrap())
    };
    agent.rules.send_replace(rules("{strict: true}"));
    agent.snapshot_sent().await.unwrap();
    agent.add(pod("a", 2)).await.unwrap();
    *world.refused.lock().unwrap() = Some("2");
    let uid = "a".parse().unwrap();
    // From the start, and then with a change that comes into force and with one that does not.
    for (text, expected) in [
        ("{strict: true}", true),
        ("{strict: false, excludeOutboundPorts: 1}", false),
        ("{strict: true, excludeOutboundPorts: 2}", true),
        ("{}", false),
    ] {
        agent.rules.send_replace(rules(text));
        let told = agent
            .status
            .wait_for(|status| status.pods.first().is_some_and(|pod| pod.strict == expected));
        tokio::time::timeout(Duration::from_secs(10), told)
            .await
            .unwrap()
            .unwrap();
        let set = async {
            while world.strict.lock().unwrap().get(&uid) != Some(&expected) {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(10), set)
            .await
            .unwrap_or_else(|_| panic!("{text} is not in force"));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn looks_at_many_pods_run_a_few_at_a_time_and_change_nothing() {
    const PODS: u64 = 50;
    let mut agent = Agent::begin(false, Duration::from_millis(10));
    agent.snapshot_sent().await.unwrap();
    // One after another, so that only looks come together.
    for number in 0..PODS {
        agent.add(pod(&format!("p{number}"), 2 + number)).await.unwrap();
    }
    // The answer comes before the status.
    let all = agent.status.wait_for(|status| {
        status.pods.len() == PODS as usize && status.pods.iter().all(|pod| pod.state == State::Captured)
    });
    let before = tokio::time::timeout(Duration::from_secs(30), all)
        .await
        .unwrap()
        .unwrap()
        .clone();
    agent.world.log();
    agent.world.attaching.lock().unwrap().1 = 0;
    let looks = async {
        while agent.world.log.lock().unwrap().len() < PODS as usize * 4 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(30), looks)
        .await
        .unwrap();
    let most = agent.world.attaching.lock().unwrap().1;
    assert!((1..=CHECKS_AT_ONCE).contains(&most), "{most} at one time");
    assert_eq!(*agent.status.borrow(), before);
}
