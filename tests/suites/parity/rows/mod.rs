//! The table. A file per group of rows.

mod inbound;
mod outbound;
mod packets;
mod rules;
mod sockets;
mod time;
mod volume;

use redirector_tests::node::Family;

use crate::table::Row;

const BOTH: &[Family] = &Family::BOTH;
const V4: &[Family] = &[Family::V4];
const V6: &[Family] = &[Family::V6];

/// All rows, under the titles that the document gives them.
pub(crate) const GROUPS: &[(&str, &[Row])] = &[
    ("Outbound", outbound::ROWS),
    ("Inbound", inbound::ROWS),
    ("Rules of a pod", rules::ROWS),
    ("Sockets of all kinds", sockets::ROWS),
    ("Packets of all kinds", packets::ROWS),
    ("Over time", time::ROWS),
    ("Volume", volume::ROWS),
];
