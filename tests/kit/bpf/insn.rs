//! One instruction, and what it does to pointers. Encoding: RFC 9669.

use super::features::Feature;

/// An instruction as it is encoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Insn {
    /// Operation code.
    pub code: u8,
    /// Destination register.
    pub dst: u8,
    /// Source register, or what kind of constant or call this is.
    pub src: u8,
    /// Offset of a jump or an access.
    pub off: i16,
    /// Constant.
    pub imm: i32,
}

/// The register that points to the end of the stack frame.
pub const FRAME_POINTER: u8 = 10;
const REGISTERS: u8 = 11;

/// What an instruction does, as far as pointers are concerned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Op {
    /// `dst = src`, all 64 bits.
    Move {
        dst: u8,
        src: u8,
    },
    /// `dst += value`.
    AddConstant {
        dst: u8,
        value: i32,
    },
    /// `dst += src`, or `dst -= src`.
    AddRegister {
        dst: u8,
        src: u8,
    },
    /// Whatever it computes is no pointer.
    Compute {
        dst: u8,
    },
    /// `dst = *(base + offset)`.
    Load {
        dst: u8,
        base: u8,
        offset: i16,
        bytes: u8,
    },
    /// `*(base + offset) = value`; a constant when there is no register.
    Store {
        base: u8,
        offset: i16,
        bytes: u8,
        value: Option<u8>,
    },
    /// A read-modify-write; the old value goes to `fetched`.
    Atomic {
        base: u8,
        offset: i16,
        bytes: u8,
        fetched: Option<u8>,
    },
    /// `dst` is a map, by the descriptor that was given to it.
    LoadMap {
        dst: u8,
        fd: i32,
    },
    /// `dst` is a 64-bit constant, or an address that leads to no context.
    LoadConstant {
        dst: u8,
    },
    /// The packet loads of classic BPF.
    LoadPacket,
    Jump {
        to: i64,
    },
    Branch {
        to: i64,
    },
    CallHelper {
        id: i32,
    },
    CallFunction {
        to: i64,
    },
    CallKernel,
    Exit,
}

/// An operation, what it needs beyond the first instruction set, and the number of slots it takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Decoded {
    pub(super) op: Op,
    pub(super) feature: Option<Feature>,
    pub(super) slots: usize,
}

const CLASS: u8 = 0x07;
const LD: u8 = 0;
const LDX: u8 = 1;
const ST: u8 = 2;
const STX: u8 = 3;
const ALU: u8 = 4;
const JMP: u8 = 5;
const JMP32: u8 = 6;
const ALU64: u8 = 7;

const MODE: u8 = 0xe0;
const MODE_IMM: u8 = 0x00;
const MODE_ABS: u8 = 0x20;
const MODE_IND: u8 = 0x40;
const MODE_MEM: u8 = 0x60;
const MODE_MEMSX: u8 = 0x80;
const MODE_ATOMIC: u8 = 0xc0;

const FROM_REGISTER: u8 = 0x08;
const ATOMIC_FETCH: i32 = 0x01;
const ATOMIC_XCHG: i32 = 0xe1;
const ATOMIC_CMPXCHG: i32 = 0xf1;
const ATOMIC_LOAD_ACQUIRE: i32 = 0x100;
const ATOMIC_STORE_RELEASE: i32 = 0x110;

/// Reads the instruction at `pc`; `None` is one that no kernel of the tables knows.
pub(super) fn decode(program: &[Insn], pc: usize) -> Option<Decoded> {
    let insn = *program.get(pc)?;
    if insn.dst >= REGISTERS {
        return None;
    }
    let (op, feature) = match insn.code & CLASS {
        LD => load_constant(insn, program.get(pc + 1).copied())?,
        LDX => load(insn)?,
        ST | STX => store(insn)?,
        ALU | ALU64 => arithmetic(insn)?,
        JMP | JMP32 => jump(insn, pc)?,
        _ => unreachable!("three bits"),
    };
    let slots = if insn.code & CLASS == LD && insn.code & MODE == MODE_IMM {
        2
    } else {
        1
    };
    Some(Decoded { op, feature, slots })
}

fn bytes(code: u8) -> u8 {
    match code & 0x18 {
        0x00 => 4,
        0x08 => 2,
        0x10 => 1,
        _ => 8,
    }
}

fn register(number: u8) -> Option<u8> {
    (number < REGISTERS).then_some(number)
}

fn load_constant(insn: Insn, second: Option<Insn>) -> Option<(Op, Option<Feature>)> {
    /// Kinds of 64-bit constants (`BPF_PSEUDO_*`).
    const VALUE: u8 = 0;
    const MAP_FD: u8 = 1;
    const MAP_VALUE: u8 = 2;
    const BTF_ID: u8 = 3;
    const FUNCTION: u8 = 4;
    let dst = insn.dst;
    match insn.code & MODE {
        MODE_IMM => {
            second.filter(|second| second.code == 0)?;
            match insn.src {
                VALUE => Some((Op::LoadConstant { dst }, None)),
                MAP_FD => Some((Op::LoadMap { dst, fd: insn.imm }, None)),
                MAP_VALUE => Some((Op::LoadConstant { dst }, Some(Feature::MapValueAddress))),
                BTF_ID => Some((Op::LoadConstant { dst }, Some(Feature::KernelVariable))),
                FUNCTION => Some((Op::LoadConstant { dst }, Some(Feature::FunctionPointer))),
                _ => None,
            }
        }
        MODE_ABS | MODE_IND => Some((Op::LoadPacket, Some(Feature::PacketLoad))),
        _ => None,
    }
}

fn load(insn: Insn) -> Option<(Op, Option<Feature>)> {
    let feature = match insn.code & MODE {
        MODE_MEM => None,
        MODE_MEMSX => Some(Feature::SignExtension),
        _ => return None,
    };
    let op = Op::Load {
        dst: insn.dst,
        base: register(insn.src)?,
        offset: insn.off,
        bytes: bytes(insn.code),
    };
    Some((op, feature))
}

fn store(insn: Insn) -> Option<(Op, Option<Feature>)> {
    let from_register = insn.code & CLASS == STX;
    let (base, offset, bytes) = (insn.dst, insn.off, bytes(insn.code));
    match insn.code & MODE {
        MODE_MEM => {
            let value = if from_register {
                Some(register(insn.src)?)
            } else {
                None
            };
            let op = Op::Store {
                base,
                offset,
                bytes,
                value,
            };
            Some((op, None))
        }
        MODE_ATOMIC if from_register => {
            let source = register(insn.src)?;
            let (fetched, feature) = match insn.imm {
                // Addition without the old value: the instruction of before, `xadd`.
                0 => (None, None),
                ATOMIC_CMPXCHG => (Some(0), Some(Feature::Atomics)),
                ATOMIC_XCHG => (Some(source), Some(Feature::Atomics)),
                ATOMIC_STORE_RELEASE => (None, Some(Feature::AcquireRelease)),
                ATOMIC_LOAD_ACQUIRE => {
                    let op = Op::Load {
                        dst: insn.dst,
                        base: source,
                        offset,
                        bytes,
                    };
                    return Some((op, Some(Feature::AcquireRelease)));
                }
                imm if imm & ATOMIC_FETCH != 0 => (Some(source), Some(Feature::Atomics)),
                _ => (None, Some(Feature::Atomics)),
            };
            let op = Op::Atomic {
                base,
                offset,
                bytes,
                fetched,
            };
            Some((op, feature))
        }
        _ => None,
    }
}

fn arithmetic(insn: Insn) -> Option<(Op, Option<Feature>)> {
    const ADD: u8 = 0x00;
    const SUB: u8 = 0x10;
    const DIV: u8 = 0x30;
    const MOD: u8 = 0x90;
    const MOV: u8 = 0xb0;
    const END: u8 = 0xd0;
    let dst = insn.dst;
    let wide = insn.code & CLASS == ALU64;
    let from_register = insn.code & FROM_REGISTER != 0;
    let operation = insn.code & 0xf0;
    if operation > END {
        return None;
    }
    if operation == END {
        // In the wide class: a swap whatever the machine's order is.
        return Some((Op::Compute { dst }, wide.then_some(Feature::UnconditionalSwap)));
    }
    let source = if from_register {
        Some(register(insn.src)?)
    } else {
        None
    };
    Some(match (operation, source) {
        (DIV | MOD, _) if insn.off != 0 => (Op::Compute { dst }, Some(Feature::SignedDivision)),
        (MOV, Some(_)) if insn.off == 1 && wide => (Op::Compute { dst }, Some(Feature::AddressSpaces)),
        (MOV, Some(_)) if insn.off != 0 => (Op::Compute { dst }, Some(Feature::SignExtension)),
        (MOV, Some(src)) if wide => (Op::Move { dst, src }, None),
        (ADD, None) if wide => (Op::AddConstant { dst, value: insn.imm }, None),
        (SUB, None) if wide => {
            let value = insn.imm.checked_neg()?;
            (Op::AddConstant { dst, value }, None)
        }
        (ADD | SUB, Some(src)) if wide => (Op::AddRegister { dst, src }, None),
        _ => (Op::Compute { dst }, None),
    })
}

fn jump(insn: Insn, pc: usize) -> Option<(Op, Option<Feature>)> {
    const JA: u8 = 0x00;
    const CALL: u8 = 0x80;
    const EXIT: u8 = 0x90;
    const JCOND: u8 = 0xe0;
    const HELPER: u8 = 0;
    const FUNCTION: u8 = 1;
    const KERNEL_FUNCTION: u8 = 2;
    let long = insn.code & CLASS == JMP32;
    let next = pc as i64 + 1;
    let near = next + i64::from(insn.off);
    let far = next + i64::from(insn.imm);
    Some(match insn.code & 0xf0 {
        JA if long => (Op::Jump { to: far }, Some(Feature::LongJump)),
        JA => (Op::Jump { to: near }, None),
        CALL if long || insn.code & FROM_REGISTER != 0 => return None,
        CALL => match insn.src {
            HELPER => (Op::CallHelper { id: insn.imm }, None),
            FUNCTION => (Op::CallFunction { to: far }, Some(Feature::Functions)),
            KERNEL_FUNCTION => (Op::CallKernel, Some(Feature::KernelFunction)),
            _ => return None,
        },
        EXIT if !long => (Op::Exit, None),
        JCOND => (Op::Branch { to: near }, Some(Feature::MayGoto)),
        operation if operation <= 0xd0 && operation != EXIT => {
            (Op::Branch { to: near }, long.then_some(Feature::NarrowBranch))
        }
        _ => return None,
    })
}
