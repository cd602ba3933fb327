//! Hand-made programs, with pointers in places where they are hard to see.

use super::*;

fn insn(code: u8, dst: u8, src: u8, off: i16, imm: i32) -> Insn {
    Insn {
        code,
        dst,
        src,
        off,
        imm,
    }
}

fn mov(dst: u8, src: u8) -> Insn {
    insn(0xbf, dst, src, 0, 0)
}

fn set(dst: u8, value: i32) -> Insn {
    insn(0xb7, dst, 0, 0, value)
}

fn add(dst: u8, value: i32) -> Insn {
    insn(0x07, dst, 0, 0, value)
}

/// `dst = *(u32 *)(base + off)`.
fn load4(dst: u8, base: u8, off: i16) -> Insn {
    insn(0x61, dst, base, off, 0)
}

/// `dst = *(u64 *)(base + off)`.
fn load8(dst: u8, base: u8, off: i16) -> Insn {
    insn(0x79, dst, base, off, 0)
}

/// `*(u64 *)(base + off) = src`.
fn store8(base: u8, src: u8, off: i16) -> Insn {
    insn(0x7b, base, src, off, 0)
}

fn helper(id: i32) -> Insn {
    insn(0x85, 0, 0, 0, id)
}

/// Calls the function that is `by` instructions after the next one.
fn function(by: i32) -> Insn {
    insn(0x85, 0, 1, 0, by)
}

/// `if dst == 0 goto +by`.
fn branch(dst: u8, by: i16) -> Insn {
    insn(0x15, dst, 0, by, 0)
}

const EXIT: Insn = Insn {
    code: 0x95,
    dst: 0,
    src: 0,
    off: 0,
    imm: 0,
};

fn walked(program: &[Insn]) -> BTreeSet<Site> {
    walk(program, Object::SkBuff, &BTreeSet::new()).unwrap()
}

/// Offsets at which a program reads its context.
fn context_reads(program: &[Insn]) -> Vec<i32> {
    reads(program, Object::SkBuff)
}

fn reads(program: &[Insn], of: Object) -> Vec<i32> {
    let reads = walked(program).into_iter().filter_map(|site| match site.used {
        Use::Access {
            object,
            offset,
            write: false,
            ..
        } if object == of => Some(offset),
        _ => None,
    });
    reads.collect()
}

#[test]
fn a_pointer_is_followed_through_registers() {
    assert_eq!(context_reads(&[load4(0, 1, 8), EXIT]), [8]);
    let moved = [mov(6, 1), add(6, 8), mov(7, 6), add(7, -4), load4(0, 7, 12), EXIT];
    assert_eq!(context_reads(&moved), [16]);
    // The low half of a pointer is none.
    assert!(context_reads(&[insn(0xbc, 1, 1, 0, 0), load4(0, 1, 8), EXIT]).is_empty());
}

#[test]
fn a_pointer_is_followed_through_the_stack() {
    let spilled = [store8(10, 1, -16), load8(3, 10, -16), load4(0, 3, 40), EXIT];
    assert_eq!(context_reads(&spilled), [40]);
    let by_address = [
        mov(2, 10),
        add(2, -64),
        store8(2, 1, 8),
        load8(3, 10, -56),
        load4(0, 3, 44),
        EXIT,
    ];
    assert_eq!(context_reads(&by_address), [44]);
    let overwritten = [
        store8(10, 1, -16),
        insn(0x63, 10, 0, -12, 0),
        load8(3, 10, -16),
        load4(0, 3, 40),
        EXIT,
    ];
    assert!(context_reads(&overwritten).is_empty());
    let elsewhere = [store8(10, 1, -16), load8(3, 10, -24), load4(0, 3, 40), EXIT];
    assert!(context_reads(&elsewhere).is_empty());
}

#[test]
fn a_place_in_the_stack_that_is_computed_may_be_any() {
    let program = [
        mov(2, 10),
        insn(0x0f, 2, 3, 0, 0),
        store8(2, 1, 0),
        load8(4, 10, -104),
        load4(0, 4, 8),
        EXIT,
    ];
    assert_eq!(context_reads(&program), [8]);
}

#[test]
fn all_paths_are_walked() {
    // r6 is the context on one path, and the stack on the other.
    let program = [mov(6, 10), branch(2, 1), mov(6, 1), load4(0, 6, -8 + 16), EXIT];
    assert_eq!(context_reads(&program), [8]);
    // What no path comes to is not looked at.
    let dead = [insn(0x05, 0, 0, 1, 0), load4(0, 1, 8), set(0, 0), EXIT];
    assert!(context_reads(&dead).is_empty());
}

#[test]
fn a_loop_comes_to_an_end() {
    // A pointer into the stack that moves on, and a context that is read after.
    let program = [
        mov(6, 1),
        mov(2, 10),
        add(2, -256),
        set(3, 32),
        store8(2, 6, 0),
        add(2, 8),
        add(3, -1),
        insn(0x55, 3, 0, -4, 0),
        load8(4, 10, -128),
        load4(0, 4, 8),
        EXIT,
    ];
    let sites = walked(&program);
    assert!(
        sites
            .iter()
            .any(|site| site.used == Use::Feature(Feature::Loop) && site.pc == 7)
    );
    assert_eq!(context_reads(&program), [8]);
    // The same with the context itself: the verifier refuses it.
    let refused = [add(1, 4), load4(2, 1, 0), branch(2, -3), set(0, 0), EXIT];
    assert_eq!(
        walk(&refused, Object::SkBuff, &BTreeSet::new()),
        Err(Fault::Computed {
            pc: 1,
            object: Object::SkBuff
        })
    );
}

#[test]
fn functions_see_arguments_and_keep_their_callers_registers() {
    let program = [
        mov(6, 1),
        function(2),
        load4(0, 6, 12),
        EXIT,
        // r6 is the caller's, and holds nothing here; r1 is the context.
        load4(2, 1, 8),
        load4(2, 6, 16),
        mov(6, 10),
        EXIT,
    ];
    assert_eq!(context_reads(&program), [8, 12]);
}

#[test]
fn functions_return_pointers_and_use_their_callers_stack() {
    let returned = [function(2), load4(0, 0, 8), EXIT, mov(0, 1), EXIT];
    assert_eq!(context_reads(&returned), [8]);
    let through_stack = [
        mov(2, 10),
        add(2, -32),
        function(3),
        load8(3, 10, -32),
        load4(0, 3, 40),
        EXIT,
        store8(2, 1, 0),
        // Its own stack is another one.
        store8(10, 2, -32),
        set(0, 0),
        EXIT,
    ];
    assert_eq!(context_reads(&through_stack), [40]);
    // What a function leaves in its own stack is gone.
    let gone = [function(2), load8(3, 0, 0), EXIT, mov(0, 10), add(0, -8), EXIT];
    assert!(context_reads(&gone).is_empty());
}

#[test]
fn a_function_is_walked_once_for_each_caller() {
    let program = [
        mov(6, 1),
        function(4),
        mov(1, 10),
        add(1, -64),
        function(1),
        EXIT,
        load4(0, 1, 8),
        EXIT,
    ];
    assert_eq!(context_reads(&program), [8]);
}

#[test]
fn calls_clobber_arguments() {
    let program = [mov(6, 1), helper(7), load4(0, 1, 8), load4(0, 6, 12), EXIT];
    assert_eq!(context_reads(&program), [12]);
}

#[test]
fn sockets_are_followed_from_where_they_come() {
    let sender = [
        load8(1, 1, 168),
        load4(2, 1, 4),
        helper(95),
        load4(2, 0, 16),
        EXIT,
    ];
    assert_eq!(reads(&sender, Object::SockCommon), [4]);
    assert_eq!(reads(&sender, Object::Sock), [16]);
    let looked_up = [helper(99), load4(0, 0, 72), EXIT];
    assert_eq!(reads(&looked_up, Object::SockCommon), [72]);
}

#[test]
fn helpers_are_noted_with_their_maps() {
    let program = [
        insn(0x18, 2, 1, 0, 7),
        insn(0, 0, 0, 0, 0),
        set(3, 0),
        helper(12),
        EXIT,
    ];
    let call = Use::Helper { id: 12, map: Some(7) };
    assert!(walked(&program).contains(&Site { used: call, pc: 3 }));
}

#[test]
fn a_tail_call_with_functions_is_noted() {
    let feature = |program: &[Insn]| {
        walked(program)
            .iter()
            .any(|site| site.used == Use::Feature(Feature::TailCallAndFunctions))
    };
    assert!(!feature(&[helper(12), EXIT]));
    assert!(!feature(&[function(1), EXIT, set(0, 0), EXIT]));
    assert!(feature(&[helper(12), function(1), EXIT, set(0, 0), EXIT]));
}

#[test]
fn what_cannot_be_walked_is_told() {
    let fault = |program: &[Insn]| walk(program, Object::SkBuff, &BTreeSet::new()).unwrap_err();
    assert_eq!(fault(&[]), Fault::Unknown { pc: 0, insn: None });
    assert!(matches!(fault(&[set(0, 0)]), Fault::Outside { pc: 0, to: 1 }));
    assert!(matches!(fault(&[branch(1, -9), EXIT]), Fault::Outside { .. }));
    assert!(matches!(
        fault(&[insn(0x8d, 1, 0, 0, 0), EXIT]),
        Fault::Unknown { .. }
    ));
    assert!(matches!(fault(&[mov(11, 1), EXIT]), Fault::Unknown { .. }));
    // Cut within a constant of two slots.
    assert!(matches!(fault(&[insn(0x18, 1, 0, 0, 0)]), Fault::Unknown { .. }));
    // A function that calls itself.
    assert!(matches!(fault(&[function(-1), EXIT]), Fault::TooDeep { pc: 0 }));
}
