//! What failed, and is tried again.

use super::*;

#[tokio::test(start_paused = true)]
async fn a_failed_pod_is_tried_again_until_it_works_or_goes() {
    let mut agent = Agent::synced().await;
    agent.world.fault("attach a");
    agent.world.fault("attach b");
    for add in [pod("a", 2), pod("b", 3)] {
        agent.add(retried(add)).await.unwrap_err();
    }
    agent.until(&["a NotCaptured", "b NotCaptured"]).await;
    assert!(
        agent.status.borrow().pods[0]
            .error
            .as_ref()
            .unwrap()
            .contains("attach a: no")
    );
    agent.delete("b", None).await.unwrap();
    agent.until(&["a NotCaptured"]).await;
    agent.world.mend();
    agent.until(&["a Captured"]).await;
}

#[tokio::test(start_paused = true)]
async fn a_pod_whose_namespace_went_is_not_tried_for_ever() {
    let mut agent = Agent::synced().await;
    agent.world.attached.lock().unwrap().insert("a".parse().unwrap());
    let gone = PodAdd {
        netns_path: Some("/nonexistent/netns".into()),
        ..retried(pod("a", 2))
    };
    agent.add(gone).await.unwrap_err();
    agent.left_attached(&[]).await;
    agent.until(&[]).await;
    // Once by the add, and once more if the look for leftovers after the snapshot was later than the test.
    let log = agent.world.log();
    assert!(
        !log.is_empty() && log.iter().all(|step| step == "forget a"),
        "{log:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn what_is_wanted_last_is_tried_again_whoever_asked_for_it() {
    let mut agent = Agent::synced().await;
    agent.world.fault("attach a");
    agent.add(retried(pod("a", 2))).await.unwrap_err();
    agent.until(&["a NotCaptured"]).await;
    let mut newest = pod("a", 2);
    newest.info.service_account = "newest".into();
    agent.add(newest).await.unwrap_err();
    agent.until(&["a NotCaptured"]).await;
    // What is wrong with an event changes nothing of that.
    let elsewhere = PodAdd {
        addresses: vec![address_of(9)],
        ..pod("a", 2)
    };
    for wrong in [elsewhere, pod("a", NODE)] {
        agent.add(wrong).await.unwrap_err();
        agent.until(&["a NotCaptured"]).await;
    }
    agent.world.mend();
    agent.until(&["a Captured"]).await;
    assert_eq!(agent.status.borrow().pods[0].service_account, "newest");
}

#[tokio::test(start_paused = true)]
async fn looks_at_a_pod_end_no_retries() {
    let mut agent = Agent::begin(false, Duration::from_millis(100));
    agent.snapshot_sent().await.unwrap();
    agent.add(pod("a", 2)).await.unwrap();
    agent.add(pod("b", 3)).await.unwrap();
    let moved = PodAdd {
        addresses: Vec::new(),
        ..retried(pod("a", 3))
    };
    assert!(matches!(agent.add(moved).await, Err(Error::Duplicate { .. })));
    agent.world.log();
    let looks = async {
        while agent
            .world
            .log
            .lock()
            .unwrap()
            .iter()
            .filter(|step| *step == "attach a")
            .count()
            < 3
        {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(30), looks)
        .await
        .unwrap();
    let told = agent.status.borrow().pods[0].clone();
    assert_eq!(told.state, State::Captured);
    assert!(
        told.error
            .unwrap()
            .contains("already belongs to the pod with UID b")
    );
    agent.delete("b", None).await.unwrap();
    let there = agent.status.wait_for(
        |status| matches!(status.pods.as_slice(), [pod] if pod.netns == 3 && pod.state == State::Captured),
    );
    tokio::time::timeout(Duration::from_secs(60), there)
        .await
        .unwrap()
        .unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_a_change_has_cost_its_proxy_gets_it_back() {
    let mut agent = Agent::synced().await;
    agent.add(pod("a", 2)).await.unwrap();
    agent.world.fault("start a");
    let mut changed = pod("a", 2);
    changed.info.service_account = "another".into();
    agent.add(changed).await.unwrap_err();
    agent.until(&["a NotCaptured"]).await;
    agent.world.mend();
    agent.until(&["a Captured"]).await;
    assert_eq!(agent.status.borrow().pods[0].service_account, "another");
}
