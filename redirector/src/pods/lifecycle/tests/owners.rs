//! Pods that come under a second UID.

use super::*;

/// As an event without a UID gives it.
fn nameless(name: &str, netns: u64) -> PodAdd {
    let mut add = pod(name, netns);
    add.info.uid = PodUid::from_name(&add.info.namespace, name).unwrap();
    add
}

/// Waits until these are the pods that are told of.
async fn told(agent: &mut Agent, uids: &[&str]) {
    let told = agent.status.wait_for(|status| {
        status
            .pods
            .iter()
            .map(|pod| pod.uid.as_str())
            .eq(uids.iter().copied())
    });
    tokio::time::timeout(Duration::from_secs(10), told)
        .await
        .unwrap()
        .unwrap();
}

#[tokio::test]
async fn a_pods_real_uid_takes_the_place_of_the_one_made_of_its_name() {
    let mut agent = Agent::synced().await;
    agent.add(nameless("a", 2)).await.unwrap();
    told(&mut agent, &["shop_a"]).await;
    // Another pod than that has no right to the namespace.
    agent.add(pod("b", 2)).await.unwrap_err();
    agent.world.log();
    agent.add(pod("a", 2)).await.unwrap();
    assert_eq!(
        agent.world.log(),
        ["rename shop_a", "stop 0s shop_a", "start a", "attach a"]
    );
    told(&mut agent, &["a"]).await;
    assert_eq!(agent.records.uids().unwrap(), ["a".parse().unwrap()]);
    // What the other one tells later, a record of it or an event, changes nothing.
    agent.add(nameless("a", 2)).await.unwrap();
    agent.add(nameless("b", 2)).await.unwrap_err();
    told(&mut agent, &["a"]).await;
    let log = agent.world.log();
    assert!(!log.iter().any(|step| step.ends_with(" a")), "{log:?}");
    agent.delete("a", None).await.unwrap();
    told(&mut agent, &[]).await;
    assert_eq!(agent.records.uids().unwrap(), []);
    assert!(agent.world.attached().unwrap().is_empty());
}

#[tokio::test]
async fn a_pod_that_cannot_be_given_its_real_uid_stays_captured() {
    for fault in ["rename shop_a", "start a"] {
        let mut agent = Agent::synced().await;
        agent.add(nameless("a", 2)).await.unwrap();
        agent.world.fault(fault);
        agent.add(pod("a", 2)).await.unwrap_err();
        assert_eq!(agent.world.attached().unwrap().len(), 1, "{fault}");
        assert!(
            !agent.world.log().iter().any(|step| step.starts_with("detach")),
            "{fault}"
        );
        agent.world.mend();
        agent.add(pod("a", 2)).await.unwrap();
        told(&mut agent, &["a"]).await;
        assert_eq!(agent.world.attached().unwrap(), ["a".parse().unwrap()], "{fault}");
        assert_eq!(agent.records.uids().unwrap(), ["a".parse().unwrap()], "{fault}");
    }
}
