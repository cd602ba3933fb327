//! What becomes of pods, and of those who wait, when the agent stops.

use super::*;

#[tokio::test]
async fn stopping_leaves_the_capture_in_place() {
    let agent = Agent::synced().await;
    agent.add(pod("a", 2)).await.unwrap();
    let (world, records, _state) = agent.stop().await;
    assert_eq!(world.log(), ["start a", "attach a", "stop 5s a"]);
    assert_eq!(world.attached.lock().unwrap().len(), 1);
    assert_eq!(uids(&records), ["a"]);
}

#[tokio::test]
async fn stopping_can_release_everything() {
    let agent = Agent::fresh(true);
    agent.add(pod("a", 2)).await.unwrap();
    agent
        .world
        .attached
        .lock()
        .unwrap()
        .insert("left".parse().unwrap());
    let (world, records, _state) = agent.stop().await;
    assert_eq!(
        world.log(),
        [
            "start a",
            "attach a",
            "release a",
            "stop 5s a",
            "detach a",
            "forget left"
        ]
    );
    assert!(world.attached.lock().unwrap().is_empty());
    assert!(uids(&records).is_empty());
}

#[tokio::test]
async fn what_waits_when_the_agent_stops_is_answered() {
    let agent = Agent::synced().await;
    let (open, first, second) = agent.busy().await;
    agent.add(pod("b", 3)).await.unwrap();
    agent.stop.cancel();
    assert!(matches!(second.await.unwrap(), Err(Error::Stopping)));
    open.send(()).unwrap();
    first.await.unwrap().unwrap();
    agent.task.await.unwrap();
}
