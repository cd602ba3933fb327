//! The helpers of the kernel, all of `enum bpf_func_id`: when each came, for which of our program types, and what brought it.
//!
//! Numbers and the side of 5.10 and of 6.1 on which each helper stands were compared with the type information of 5.10.262,
//! 6.1.192 and 6.18. Which program types have it is from `tc_cls_act_func_proto`, `sk_lookup_func_proto`,
//! `bpf_sk_base_func_proto` (net/core/filter.c) and `bpf_base_func_proto` (kernel/bpf/helpers.c). The list is complete: kernels
//! add functions (`Feature::KernelFunction`) instead of helpers since 6.2.

use aya_obj::generated::bpf_map_type;

use super::{Kind, Version, fields::Object};

/// `bpf_tail_call`.
pub(super) const TAIL_CALL: i32 = 12;
const MAP_LOOKUP_ELEM: i32 = 1;
const MAP_UPDATE_ELEM: i32 = 2;

/// A helper.
#[derive(Debug)]
pub struct Helper {
    id: i32,
    /// Its name, without `bpf_`.
    pub name: &'static str,
    since: (Version, &'static str),
    kinds: &'static [Kind],
    /// When our program types got it, if that was later.
    here: Option<(Version, &'static str)>,
}

const BOTH: &[Kind] = &[Kind::Classifier, Kind::Lookup];
const CLASSIFIER: &[Kind] = &[Kind::Classifier];
const NEITHER: &[Kind] = &[];

const fn helper(
    id: i32,
    name: &'static str,
    since: (u8, u8),
    source: &'static str,
    kinds: &'static [Kind],
) -> Helper {
    Helper {
        id,
        name,
        since: (Version(since.0, since.1), source),
        kinds,
        here: None,
    }
}

impl Helper {
    const fn here_since(mut self, since: (u8, u8), source: &'static str) -> Self {
        self.here = Some((Version(since.0, since.1), source));
        self
    }

    /// When programs of a type could first call it, and what brought that; `None` if they never could.
    pub fn since(&self, kind: Kind) -> Option<(Version, &'static str)> {
        let own = self.here.unwrap_or(self.since);
        self.kinds
            .contains(&kind)
            .then(|| if own.0 < kind.since().0 { kind.since() } else { own })
    }
}

/// The helper of a number.
pub fn find(id: i32) -> Option<&'static Helper> {
    HELPERS.iter().find(|helper| helper.id == id)
}

/// When a helper could first be given a map of a type, where that was later than both of them; and what brought it.
pub fn with_map(id: i32, map_type: u32) -> Option<(Version, &'static str)> {
    let is = |kind: bpf_map_type| kind as u32 == map_type;
    let sockets = is(bpf_map_type::BPF_MAP_TYPE_SOCKMAP) || is(bpf_map_type::BPF_MAP_TYPE_SOCKHASH);
    match id {
        MAP_LOOKUP_ELEM if sockets => Some((Version(5, 8), "64d85290d79c")),
        MAP_UPDATE_ELEM if sockets => Some((Version(5, 10), "0126240f448d")),
        _ => None,
    }
}

/// What a helper's result points to, if that has fields; `sockets` says whether it was given a map of sockets.
pub(super) fn returns(id: i32, sockets: bool) -> Option<Object> {
    match find(id)?.name {
        "map_lookup_elem" if sockets => Some(Object::Sock),
        "sk_lookup_tcp" | "sk_lookup_udp" | "sk_fullsock" | "get_listener_sock" => Some(Object::Sock),
        "skc_lookup_tcp" => Some(Object::SockCommon),
        "tcp_sock" => Some(Object::TcpSock),
        _ => None,
    }
}

#[rustfmt::skip]
const HELPERS: &[Helper] = &[
    helper(1, "map_lookup_elem", (3, 19), "d0003ec01c66", BOTH),
    helper(2, "map_update_elem", (3, 19), "d0003ec01c66", BOTH),
    helper(3, "map_delete_elem", (3, 19), "d0003ec01c66", BOTH),
    helper(4, "probe_read", (4, 1), "2541517c32be", NEITHER),
    helper(5, "ktime_get_ns", (4, 1), "d9847d310ab4", BOTH),
    helper(6, "trace_printk", (4, 1), "9c959c863f82", BOTH),
    helper(7, "get_prandom_u32", (4, 1), "03e69b508b6f", BOTH),
    helper(8, "get_smp_processor_id", (4, 1), "c04167ce2ca0", BOTH),
    helper(9, "skb_store_bytes", (4, 1), "91bc4822c3d6", CLASSIFIER),
    helper(10, "l3_csum_replace", (4, 1), "91bc4822c3d6", CLASSIFIER),
    helper(11, "l4_csum_replace", (4, 1), "91bc4822c3d6", CLASSIFIER),
    helper(12, "tail_call", (4, 2), "04fd61ab36ec", BOTH),
    helper(13, "clone_redirect", (4, 2), "3896d655f4d4", CLASSIFIER),
    helper(14, "get_current_pid_tgid", (4, 2), "ffeedafbf023", BOTH).here_since((6, 10), "eb166e522c77"),
    helper(15, "get_current_uid_gid", (4, 2), "ffeedafbf023", NEITHER),
    helper(16, "get_current_comm", (4, 2), "ffeedafbf023", NEITHER),
    helper(17, "get_cgroup_classid", (4, 3), "8d20aabe1c76", CLASSIFIER),
    helper(18, "skb_vlan_push", (4, 3), "4e10df9a60d9", CLASSIFIER),
    helper(19, "skb_vlan_pop", (4, 3), "4e10df9a60d9", CLASSIFIER),
    helper(20, "skb_get_tunnel_key", (4, 3), "d3aa45ce6b94", CLASSIFIER),
    helper(21, "skb_set_tunnel_key", (4, 3), "d3aa45ce6b94", CLASSIFIER),
    helper(22, "perf_event_read", (4, 3), "35578d798400", NEITHER),
    helper(23, "redirect", (4, 4), "27b29f63058d", CLASSIFIER),
    helper(24, "get_route_realm", (4, 4), "c46646d0484f", CLASSIFIER),
    helper(25, "perf_event_output", (4, 4), "a43eec304259", BOTH),
    helper(26, "skb_load_bytes", (4, 5), "05c74e5e53f6", CLASSIFIER),
    helper(27, "get_stackid", (4, 6), "d5a3b1f69186", NEITHER),
    helper(28, "csum_diff", (4, 6), "7d672345ed29", CLASSIFIER),
    helper(29, "skb_get_tunnel_opt", (4, 6), "14ca0751c96f", CLASSIFIER),
    helper(30, "skb_set_tunnel_opt", (4, 6), "14ca0751c96f", CLASSIFIER),
    helper(31, "skb_change_proto", (4, 8), "6578171a7ff0", CLASSIFIER),
    helper(32, "skb_change_type", (4, 8), "d2485c4242a8", CLASSIFIER),
    helper(33, "skb_under_cgroup", (4, 8), "4a482f34afcc", CLASSIFIER),
    helper(34, "get_hash_recalc", (4, 8), "13c5c240f789", CLASSIFIER),
    helper(35, "get_current_task", (4, 8), "606274c5abd8", BOTH).here_since((5, 8), "f470378c7562"),
    helper(36, "probe_write_user", (4, 8), "96ae52279594", NEITHER),
    helper(37, "current_task_under_cgroup", (4, 9), "60d20f9195b2", NEITHER),
    helper(38, "skb_change_tail", (4, 9), "5293efe62df8", CLASSIFIER),
    helper(39, "skb_pull_data", (4, 9), "36bbef52c7eb", CLASSIFIER),
    helper(40, "csum_update", (4, 9), "36bbef52c7eb", CLASSIFIER),
    helper(41, "set_hash_invalid", (4, 9), "7a4b28c6cc9f", CLASSIFIER),
    helper(42, "get_numa_node_id", (4, 10), "2d0e30c30f84", BOTH),
    helper(43, "skb_change_head", (4, 10), "3a0af8fd61f9", CLASSIFIER).here_since((5, 8), "6f3f65d80dac"),
    helper(44, "xdp_adjust_head", (4, 10), "17bedab27231", NEITHER),
    helper(45, "probe_read_str", (4, 11), "a5e8c07059d0", NEITHER),
    helper(46, "get_socket_cookie", (4, 12), "91b8270f2a4d", CLASSIFIER),
    helper(47, "get_socket_uid", (4, 12), "6acc5c291068", CLASSIFIER),
    helper(48, "set_hash", (4, 13), "ded092cd73c2", CLASSIFIER),
    helper(49, "setsockopt", (4, 13), "8c4b4c7e9ff0", NEITHER),
    helper(50, "skb_adjust_room", (4, 13), "2be7e212d541", CLASSIFIER),
    helper(51, "redirect_map", (4, 14), "97f91a7cf04f", NEITHER),
    helper(52, "sk_redirect_map", (4, 14), "174a79ff9515", NEITHER),
    helper(53, "sock_map_update", (4, 14), "174a79ff9515", NEITHER),
    helper(54, "xdp_adjust_meta", (4, 15), "de8f3a83b0a0", NEITHER),
    helper(55, "perf_event_read_value", (4, 15), "908432ca84fc", NEITHER),
    helper(56, "perf_prog_read_value", (4, 15), "4bebdc7a85aa", NEITHER),
    helper(57, "getsockopt", (4, 15), "cd86d1fd2102", NEITHER),
    helper(58, "override_return", (4, 16), "9802d86585db", NEITHER),
    helper(59, "sock_ops_cb_flags_set", (4, 16), "b13d88072172", NEITHER),
    helper(60, "msg_redirect_map", (4, 17), "4f738adba30a", NEITHER),
    helper(61, "msg_apply_bytes", (4, 17), "2a100317c9eb", NEITHER),
    helper(62, "msg_cork_bytes", (4, 17), "91843d540a13", NEITHER),
    helper(63, "msg_pull_data", (4, 17), "015632bb30da", NEITHER),
    helper(64, "bind", (4, 17), "d74bad4e74ee", NEITHER),
    helper(65, "xdp_adjust_tail", (4, 18), "b32cc5b9a346", NEITHER),
    helper(66, "skb_get_xfrm_state", (4, 18), "12bed760a78d", CLASSIFIER),
    helper(67, "get_stack", (4, 18), "de2ff05f48af", NEITHER),
    helper(68, "skb_load_bytes_relative", (4, 18), "4e1ec56cdc59", CLASSIFIER),
    helper(69, "fib_lookup", (4, 18), "87f5fc7e48dd", CLASSIFIER),
    helper(70, "sock_hash_update", (4, 18), "81110384441a", NEITHER),
    helper(71, "msg_redirect_hash", (4, 18), "81110384441a", NEITHER),
    helper(72, "sk_redirect_hash", (4, 18), "81110384441a", NEITHER),
    helper(73, "lwt_push_encap", (4, 18), "fe94cc290f53", NEITHER),
    helper(74, "lwt_seg6_store_bytes", (4, 18), "fe94cc290f53", NEITHER),
    helper(75, "lwt_seg6_adjust_srh", (4, 18), "fe94cc290f53", NEITHER),
    helper(76, "lwt_seg6_action", (4, 18), "fe94cc290f53", NEITHER),
    helper(77, "rc_repeat", (4, 18), "f4364dcfc86d", NEITHER),
    helper(78, "rc_keydown", (4, 18), "f4364dcfc86d", NEITHER),
    helper(79, "skb_cgroup_id", (4, 18), "cb20b08ead40", CLASSIFIER),
    helper(80, "get_current_cgroup_id", (4, 18), "bf6fa2c893c5", NEITHER),
    helper(81, "get_local_storage", (4, 19), "cd3394317653", NEITHER),
    helper(82, "sk_select_reuseport", (4, 19), "2dbb9b9e6df6", NEITHER),
    helper(83, "skb_ancestor_cgroup_id", (4, 19), "7723628101aa", CLASSIFIER),
    helper(84, "sk_lookup_tcp", (4, 20), "6acc9b432e67", CLASSIFIER),
    helper(85, "sk_lookup_udp", (4, 20), "6acc9b432e67", CLASSIFIER),
    helper(86, "sk_release", (4, 20), "6acc9b432e67", BOTH),
    helper(87, "map_push_elem", (4, 20), "f1a2e44a3aec", BOTH),
    helper(88, "map_pop_elem", (4, 20), "f1a2e44a3aec", BOTH),
    helper(89, "map_peek_elem", (4, 20), "f1a2e44a3aec", BOTH),
    helper(90, "msg_push_data", (4, 20), "6fff607e2f14", NEITHER),
    helper(91, "msg_pop_data", (5, 0), "7246d8ed4dcc", NEITHER),
    helper(92, "rc_pointer_rel", (5, 0), "01d3240a04f4", NEITHER),
    helper(93, "spin_lock", (5, 1), "d83525ca62cf", BOTH),
    helper(94, "spin_unlock", (5, 1), "d83525ca62cf", BOTH),
    helper(95, "sk_fullsock", (5, 1), "46f8bc92758c", CLASSIFIER),
    helper(96, "tcp_sock", (5, 1), "655a51e536c0", CLASSIFIER),
    helper(97, "skb_ecn_set_ce", (5, 1), "f7c917ba11a6", CLASSIFIER),
    helper(98, "get_listener_sock", (5, 1), "dbafd7ddd623", CLASSIFIER),
    helper(99, "skc_lookup_tcp", (5, 2), "edbf8c01de5a", CLASSIFIER),
    helper(100, "tcp_check_syncookie", (5, 2), "399040847084", CLASSIFIER),
    helper(101, "sysctl_get_name", (5, 2), "808649fb787d", NEITHER),
    helper(102, "sysctl_get_current_value", (5, 2), "1d11b3016cec", NEITHER),
    helper(103, "sysctl_get_new_value", (5, 2), "4e63acdff864", NEITHER),
    helper(104, "sysctl_set_new_value", (5, 2), "4e63acdff864", NEITHER),
    helper(105, "strtol", (5, 2), "d7a4cb9b6705", NEITHER),
    helper(106, "strtoul", (5, 2), "d7a4cb9b6705", NEITHER),
    helper(107, "sk_storage_get", (5, 2), "6ac99e8f23d4", CLASSIFIER),
    helper(108, "sk_storage_delete", (5, 2), "6ac99e8f23d4", CLASSIFIER),
    helper(109, "send_signal", (5, 3), "8b401f9ed244", NEITHER),
    helper(110, "tcp_gen_syncookie", (5, 3), "70d66244317e", CLASSIFIER),
    helper(111, "skb_output", (5, 5), "a7658e1a4164", NEITHER),
    helper(112, "probe_read_user", (5, 5), "6ae08ae3dea2", BOTH).here_since((5, 8), "f470378c7562"),
    helper(113, "probe_read_kernel", (5, 5), "6ae08ae3dea2", BOTH).here_since((5, 8), "f470378c7562"),
    helper(114, "probe_read_user_str", (5, 5), "6ae08ae3dea2", BOTH).here_since((5, 8), "f470378c7562"),
    helper(115, "probe_read_kernel_str", (5, 5), "6ae08ae3dea2", BOTH).here_since((5, 8), "f470378c7562"),
    helper(116, "tcp_send_ack", (5, 6), "206057fe020a", NEITHER),
    helper(117, "send_signal_thread", (5, 6), "8482941f0906", NEITHER),
    helper(118, "jiffies64", (5, 6), "5576b991e9c1", BOTH),
    helper(119, "read_branch_records", (5, 6), "fff7b64355ea", NEITHER),
    helper(120, "get_ns_current_pid_tgid", (5, 7), "b4490c5c4e02", BOTH).here_since((6, 10), "eb166e522c77"),
    helper(121, "xdp_output", (5, 7), "d831ee84bfc9", NEITHER),
    helper(122, "get_netns_cookie", (5, 7), "f318903c0bf4", CLASSIFIER).here_since((6, 15), "eb62f49de7ec"),
    helper(123, "get_current_ancestor_cgroup_id", (5, 7), "0f09abd105da", NEITHER),
    helper(124, "sk_assign", (5, 7), "cf7fbe660f2d", BOTH),
    helper(125, "ktime_get_boot_ns", (5, 8), "71d19214776e", BOTH),
    helper(126, "seq_printf", (5, 8), "492e639f0c22", NEITHER),
    helper(127, "seq_write", (5, 8), "492e639f0c22", NEITHER),
    helper(128, "sk_cgroup_id", (5, 8), "f307fa2cb4c9", NEITHER),
    helper(129, "sk_ancestor_cgroup_id", (5, 8), "f307fa2cb4c9", NEITHER),
    helper(130, "ringbuf_output", (5, 8), "457f44363a88", BOTH),
    helper(131, "ringbuf_reserve", (5, 8), "457f44363a88", BOTH),
    helper(132, "ringbuf_submit", (5, 8), "457f44363a88", BOTH),
    helper(133, "ringbuf_discard", (5, 8), "457f44363a88", BOTH),
    helper(134, "ringbuf_query", (5, 8), "457f44363a88", BOTH),
    helper(135, "csum_level", (5, 8), "7cdec54f9713", CLASSIFIER),
    helper(136, "skc_to_tcp6_sock", (5, 9), "af7ec1383361", BOTH).here_since((5, 10), "1df8f55a37bd"),
    helper(137, "skc_to_tcp_sock", (5, 9), "478cfbdf5f13", BOTH).here_since((5, 10), "1df8f55a37bd"),
    helper(138, "skc_to_tcp_timewait_sock", (5, 9), "478cfbdf5f13", BOTH).here_since((5, 10), "1df8f55a37bd"),
    helper(139, "skc_to_tcp_request_sock", (5, 9), "478cfbdf5f13", BOTH).here_since((5, 10), "1df8f55a37bd"),
    helper(140, "skc_to_udp6_sock", (5, 9), "0d4fad3e57df", BOTH).here_since((5, 10), "1df8f55a37bd"),
    helper(141, "get_task_stack", (5, 9), "fa28dcb82a38", NEITHER),
    helper(142, "load_hdr_opt", (5, 10), "0813a841566f", NEITHER),
    helper(143, "store_hdr_opt", (5, 10), "0813a841566f", NEITHER),
    helper(144, "reserve_hdr_opt", (5, 10), "0813a841566f", NEITHER),
    helper(145, "inode_storage_get", (5, 10), "8ea636848aca", NEITHER),
    helper(146, "inode_storage_delete", (5, 10), "8ea636848aca", NEITHER),
    helper(147, "d_path", (5, 10), "6e22ab9da793", NEITHER),
    helper(148, "copy_from_user", (5, 10), "07be4c4a3e7a", NEITHER),
    helper(149, "snprintf_btf", (5, 10), "c4d0bfb45068", BOTH),
    helper(150, "seq_printf_btf", (5, 10), "eb411377aed9", NEITHER),
    helper(151, "skb_cgroup_classid", (5, 10), "b426ce83baa7", CLASSIFIER),
    helper(152, "redirect_neigh", (5, 10), "b4ab31414970", CLASSIFIER),
    helper(153, "per_cpu_ptr", (5, 10), "eaa6bcb71ef6", BOTH),
    helper(154, "this_cpu_ptr", (5, 10), "63d9b80dcf2c", BOTH),
    helper(155, "redirect_peer", (5, 10), "9aa1206e8f48", CLASSIFIER),
    helper(156, "task_storage_get", (5, 11), "4cf1bc1f1045", NEITHER),
    helper(157, "task_storage_delete", (5, 11), "4cf1bc1f1045", NEITHER),
    helper(158, "get_current_task_btf", (5, 11), "3ca1032ab7ab", NEITHER),
    helper(159, "bprm_opts_set", (5, 11), "3f6719c7b62f", NEITHER),
    helper(160, "ktime_get_coarse_ns", (5, 11), "d05512618056", BOTH),
    helper(161, "ima_inode_hash", (5, 11), "27672f0d280a", NEITHER),
    helper(162, "sock_from_file", (5, 11), "4f19cab76136", NEITHER),
    helper(163, "check_mtu", (5, 12), "34b2021cc616", CLASSIFIER),
    helper(164, "for_each_map_elem", (5, 13), "69c087ba6225", BOTH),
    helper(165, "snprintf", (5, 13), "7b15523a989b", BOTH),
    helper(166, "sys_bpf", (5, 14), "79a7f8bdb159", NEITHER),
    helper(167, "btf_find_by_name_kind", (5, 14), "3d78417b60fb", NEITHER),
    helper(168, "sys_close", (5, 14), "3abea089246f", NEITHER),
    helper(169, "timer_init", (5, 15), "b00628b1c7d5", BOTH),
    helper(170, "timer_set_callback", (5, 15), "b00628b1c7d5", BOTH),
    helper(171, "timer_start", (5, 15), "b00628b1c7d5", BOTH),
    helper(172, "timer_cancel", (5, 15), "b00628b1c7d5", BOTH),
    helper(173, "get_func_ip", (5, 15), "5d8b583d04ae", NEITHER),
    helper(174, "get_attach_cookie", (5, 15), "7adfc6c9b315", NEITHER),
    helper(175, "task_pt_regs", (5, 15), "dd6e10fbd9fb", NEITHER),
    helper(176, "get_branch_snapshot", (5, 16), "856c02dbce4f", NEITHER),
    helper(177, "trace_vprintk", (5, 16), "10aceb629e19", BOTH),
    helper(178, "skc_to_unix_sock", (5, 16), "9eeb3aa33ae0", BOTH),
    helper(179, "kallsyms_lookup_name", (5, 16), "d6aef08a872b", NEITHER),
    helper(180, "find_vma", (5, 17), "7c7e3d31e785", NEITHER),
    helper(181, "loop", (5, 17), "e6f2dd0f8067", BOTH),
    helper(182, "strncmp", (5, 17), "c5fb19937455", BOTH),
    helper(183, "get_func_arg", (5, 17), "f92c1e183604", NEITHER),
    helper(184, "get_func_ret", (5, 17), "f92c1e183604", NEITHER),
    helper(185, "get_func_arg_cnt", (5, 17), "f92c1e183604", NEITHER),
    helper(186, "get_retval", (5, 18), "b44123b4a3dc", NEITHER),
    helper(187, "set_retval", (5, 18), "b44123b4a3dc", NEITHER),
    helper(188, "xdp_get_buff_len", (5, 18), "0165cc817075", NEITHER),
    helper(189, "xdp_load_bytes", (5, 18), "3f364222d032", NEITHER),
    helper(190, "xdp_store_bytes", (5, 18), "3f364222d032", NEITHER),
    helper(191, "copy_from_user_task", (5, 18), "376040e47334", NEITHER),
    helper(192, "skb_set_tstamp", (5, 18), "9bb984f28d5b", CLASSIFIER),
    helper(193, "ima_file_hash", (5, 18), "174b16946e39", NEITHER),
    helper(194, "kptr_xchg", (5, 19), "c0a5a21c25f3", BOTH),
    helper(195, "map_lookup_percpu_elem", (5, 19), "07343110b293", BOTH),
    helper(196, "skc_to_mptcp_sock", (5, 19), "3bc253c2e652", BOTH),
    helper(197, "dynptr_from_mem", (5, 19), "263ae152e962", BOTH),
    helper(198, "ringbuf_reserve_dynptr", (5, 19), "bc34dee65a65", BOTH),
    helper(199, "ringbuf_submit_dynptr", (5, 19), "bc34dee65a65", BOTH),
    helper(200, "ringbuf_discard_dynptr", (5, 19), "bc34dee65a65", BOTH),
    helper(201, "dynptr_read", (5, 19), "13bbbfbea759", BOTH),
    helper(202, "dynptr_write", (5, 19), "13bbbfbea759", BOTH),
    helper(203, "dynptr_data", (5, 19), "34d4ef5775f7", BOTH),
    helper(204, "tcp_raw_gen_syncookie_ipv4", (6, 0), "33bf9885040c", CLASSIFIER),
    helper(205, "tcp_raw_gen_syncookie_ipv6", (6, 0), "33bf9885040c", CLASSIFIER),
    helper(206, "tcp_raw_check_syncookie_ipv4", (6, 0), "33bf9885040c", CLASSIFIER),
    helper(207, "tcp_raw_check_syncookie_ipv6", (6, 0), "33bf9885040c", CLASSIFIER),
    helper(208, "ktime_get_tai_ns", (6, 1), "c8996c98f703", BOTH),
    helper(209, "user_ringbuf_drain", (6, 1), "205715673844", BOTH),
    helper(210, "cgrp_storage_get", (6, 2), "c4bcfb38a95e", BOTH),
    helper(211, "cgrp_storage_delete", (6, 2), "c4bcfb38a95e", BOTH),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_is_there_once() {
        assert!(HELPERS.iter().zip(1..).all(|(helper, id)| helper.id == id));
        assert_eq!(HELPERS.len(), 211);
    }

    #[test]
    fn versions_rise_with_numbers() {
        for pair in HELPERS.windows(2) {
            assert!(pair[0].since.0 <= pair[1].since.0, "{}", pair[1].name);
        }
    }

    #[test]
    fn a_type_has_no_helper_before_it_is_there_itself() {
        let assign = find(124).unwrap();
        assert_eq!(assign.since(Kind::Classifier).unwrap().0, Version(5, 7));
        assert_eq!(assign.since(Kind::Lookup).unwrap().0, Version(5, 9));
        assert!(find(122).unwrap().since(Kind::Lookup).is_none());
        assert_eq!(
            find(122).unwrap().since(Kind::Classifier).unwrap().0,
            Version(6, 15)
        );
    }
}
