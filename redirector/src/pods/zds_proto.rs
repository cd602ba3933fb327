//! The messages of ZDS: `istio.workload.zds`, proto/zds.proto of ztunnel. Written by hand, since there are few.

use prost::{Message, Oneof};

/// The first message of the proxy.
#[derive(Clone, PartialEq, Message)]
pub(super) struct ZdsHello {
    #[prost(enumeration = "Version", tag = "1")]
    pub(super) version: i32,
}

/// Version of the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
pub(super) enum Version {
    /// So that a hello is never empty, which would read as the end of the stream.
    NotUsed = 0,
    V1 = 1,
}

/// What the node agent asks for.
#[derive(Clone, PartialEq, Message)]
pub(super) struct WorkloadRequest {
    #[prost(oneof = "Request", tags = "1, 2, 3, 5")]
    pub(super) payload: Option<Request>,
}

/// The payload of a [`WorkloadRequest`].
#[derive(Clone, PartialEq, Oneof)]
pub(super) enum Request {
    #[prost(message, tag = "1")]
    Add(AddWorkload),
    #[prost(message, tag = "5")]
    Keep(KeepWorkload),
    #[prost(message, tag = "2")]
    Del(DelWorkload),
    #[prost(message, tag = "3")]
    SnapshotSent(SnapshotSent),
}

/// Capture a pod; its namespace comes alongside.
#[derive(Clone, PartialEq, Message)]
pub(super) struct AddWorkload {
    #[prost(string, tag = "1")]
    pub(super) uid: String,
    #[prost(message, optional, tag = "2")]
    pub(super) workload_info: Option<WorkloadInfo>,
}

/// Who a pod is.
#[derive(Clone, PartialEq, Message)]
pub(super) struct WorkloadInfo {
    #[prost(string, tag = "1")]
    pub(super) name: String,
    #[prost(string, tag = "2")]
    pub(super) namespace: String,
    #[prost(string, tag = "3")]
    pub(super) service_account: String,
}

/// A pod exists, though its namespace is not known.
#[derive(Clone, PartialEq, Message)]
pub(super) struct KeepWorkload {
    #[prost(string, tag = "1")]
    pub(super) uid: String,
}

/// Release a pod.
#[derive(Clone, PartialEq, Message)]
pub(super) struct DelWorkload {
    #[prost(string, tag = "2")]
    pub(super) uid: String,
}

/// All pods have been named.
#[derive(Clone, PartialEq, Message)]
pub(super) struct SnapshotSent {}

/// The proxy's answer to a request.
#[derive(Clone, PartialEq, Message)]
pub(super) struct WorkloadResponse {
    #[prost(oneof = "Response", tags = "1")]
    pub(super) payload: Option<Response>,
}

/// The payload of a [`WorkloadResponse`].
#[derive(Clone, PartialEq, Oneof)]
pub(super) enum Response {
    #[prost(message, tag = "1")]
    Ack(Ack),
}

/// Done, or why not.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Ack {
    #[prost(string, tag = "1")]
    pub(super) error: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes by the rules of protobuf (tag = field << 3 | wire type), field numbers by zds.proto.
    #[test]
    fn messages_have_the_bytes_of_the_protocol() {
        assert_eq!(
            ZdsHello {
                version: Version::V1 as i32
            }
            .encode_to_vec(),
            [0x08, 0x01]
        );
        let ack = |error: &str| WorkloadResponse {
            payload: Some(Response::Ack(Ack { error: error.into() })),
        };
        assert_eq!(ack("").encode_to_vec(), [0x0a, 0x00]);
        assert_eq!(ack("no").encode_to_vec(), b"\x0a\x04\x0a\x02no");

        let table: [(&[u8], Option<Request>); 6] = [
            (
                b"\x0a\x14\x0a\x03u-1\x12\x0d\x0a\x03web\x12\x02ns\x1a\x02sa",
                Some(Request::Add(AddWorkload {
                    uid: "u-1".into(),
                    workload_info: Some(WorkloadInfo {
                        name: "web".into(),
                        namespace: "ns".into(),
                        service_account: "sa".into(),
                    }),
                })),
            ),
            (
                b"\x2a\x05\x0a\x03u-1",
                Some(Request::Keep(KeepWorkload { uid: "u-1".into() })),
            ),
            (
                b"\x12\x05\x12\x03u-1",
                Some(Request::Del(DelWorkload { uid: "u-1".into() })),
            ),
            (b"\x1a\x00", Some(Request::SnapshotSent(SnapshotSent {}))),
            // A field of a later version is passed over.
            (b"\x22\x00", None),
            (b"\x1a\x00\x22\x00", Some(Request::SnapshotSent(SnapshotSent {}))),
        ];
        for (bytes, payload) in table {
            assert_eq!(
                WorkloadRequest::decode(bytes).unwrap().payload,
                payload,
                "{bytes:02x?}"
            );
            if bytes.last() != Some(&0) {
                assert_eq!(WorkloadRequest { payload }.encode_to_vec(), bytes);
            }
        }
    }
}
