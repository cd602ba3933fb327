//! A walk over all paths of a program that follows its pointers, and notes what it uses.
//!
//! It is an abstract interpretation: at each place it keeps the set of pointers that every register and stack slot may hold, on
//! whatever path, and goes on until these sets grow no more. Functions are walked once per way to call them. What is on no
//! path is not looked at, as the verifier refuses it anyway.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    features::Feature,
    fields::{self, Object},
    helpers,
    insn::{Decoded, Insn, Op, decode},
    state::{Base, State, Value},
};

/// Calls within calls that the verifier allows (`MAX_CALL_FRAMES`).
const FRAMES: usize = 8;
/// Instructions looked at; ours take some ten thousands.
const STEPS: usize = 4_000_000;
/// The largest program of before 5.2.
const SMALL: usize = 4096;

/// What a program uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Use {
    /// A call of a helper; with the descriptor of the map that it is given, if it is given one.
    Helper {
        /// `enum bpf_func_id`.
        id: i32,
        /// Of the first argument that can be a map.
        map: Option<i32>,
    },
    /// A load or a store.
    Access {
        /// In what.
        object: Object,
        /// Where.
        offset: i32,
        /// How many bytes.
        bytes: u8,
        /// Whether it is a store.
        write: bool,
    },
    /// An instruction, or a shape of the program, that not every kernel knows.
    Feature(Feature),
}

/// A use, and at which instruction it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Site {
    /// What.
    pub used: Use,
    /// Index of the instruction in the linked program.
    pub pc: usize,
}

/// Why a program cannot be walked.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// An instruction that no kernel of the tables knows.
    #[error("instruction {pc} is not known: {insn:?}")]
    Unknown {
        /// Which.
        pc: usize,
        /// It.
        insn: Option<Insn>,
    },
    /// A jump or a call that leads out of the program.
    #[error("instruction {pc} goes to {to}, which is outside of the program")]
    Outside {
        /// Which.
        pc: usize,
        /// Where to.
        to: i64,
    },
    /// The verifier refuses it, since it has to know the field.
    #[error("instruction {pc} accesses {object:?} at an offset that is computed")]
    Computed {
        /// Which.
        pc: usize,
        /// In what.
        object: Object,
    },
    /// More calls within calls than the verifier allows.
    #[error("instruction {pc} calls more than {FRAMES} functions deep")]
    TooDeep {
        /// Which.
        pc: usize,
    },
    /// A fault of the walk's.
    #[error("the walk does not come to an end")]
    Endless,
}

/// A place of a program: an instruction, and the places to which the functions entered so far return.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Place {
    returns: Vec<usize>,
    pc: usize,
}

struct Walk<'a> {
    program: &'a [Insn],
    socket_maps: &'a BTreeSet<i32>,
    uses: BTreeSet<Site>,
    known: BTreeMap<Place, State>,
    open: BTreeSet<Place>,
}

/// Walks a program, and returns everything it uses. `socket_maps` are the descriptors of maps in which a look-up finds a socket.
///
/// # Errors
/// What cannot be followed.
pub fn walk(program: &[Insn], context: Object, socket_maps: &BTreeSet<i32>) -> Result<BTreeSet<Site>, Fault> {
    let start = Place {
        returns: Vec::new(),
        pc: 0,
    };
    let mut walk = Walk {
        program,
        socket_maps,
        uses: BTreeSet::new(),
        known: BTreeMap::new(),
        open: BTreeSet::new(),
    };
    walk.reach(start, State::entry(context));
    for _ in 0..STEPS {
        let Some(place) = walk.open.pop_first() else {
            walk.shape();
            return Ok(walk.uses);
        };
        walk.step(place)?;
    }
    Err(Fault::Endless)
}

impl Walk<'_> {
    fn note(&mut self, pc: usize, used: Use) {
        self.uses.insert(Site { used, pc });
    }

    /// A path comes to a place in a state.
    fn reach(&mut self, place: Place, state: State) {
        let new = match self.known.get_mut(&place) {
            Some(known) => known.join(&state),
            None => {
                self.known.insert(place.clone(), state);
                true
            }
        };
        if new {
            self.open.insert(place);
        }
    }

    fn target(&self, pc: usize, to: i64) -> Result<usize, Fault> {
        usize::try_from(to)
            .ok()
            .filter(|to| *to < self.program.len())
            .ok_or(Fault::Outside { pc, to })
    }

    fn step(&mut self, place: Place) -> Result<(), Fault> {
        let Place { mut returns, pc } = place.clone();
        let mut state = self.known[&place].clone();
        let unknown = || Fault::Unknown {
            pc,
            insn: self.program.get(pc).copied(),
        };
        let Decoded { op, feature, slots } = decode(self.program, pc).ok_or_else(unknown)?;
        if let Some(feature) = feature {
            self.note(pc, Use::Feature(feature));
        }
        let mut next = Some((pc + slots) as i64);
        match op {
            Op::Move { dst, src } => state.set(dst, state.register(src).clone()),
            Op::AddConstant { dst, value } => state.set(dst, state.register(dst).moved(Some(value))),
            Op::AddRegister { dst, src } => {
                let mut sum = state.register(dst).moved(None);
                sum.join(&state.register(src).moved(None));
                state.set(dst, sum);
            }
            Op::Compute { dst } | Op::LoadConstant { dst } => state.set(dst, Value::default()),
            Op::LoadMap { dst, fd } => state.set(dst, Value::at(Base::Map(fd))),
            Op::Load {
                dst,
                base,
                offset,
                bytes,
            } => {
                let loaded = self.access(pc, &mut state, base, offset, bytes, None)?;
                state.set(dst, loaded);
            }
            Op::Store {
                base,
                offset,
                bytes,
                value,
            } => {
                let value = value.map_or_else(Value::default, |value| state.register(value).clone());
                self.access(pc, &mut state, base, offset, bytes, Some(&value))?;
            }
            Op::Atomic {
                base,
                offset,
                bytes,
                fetched,
            } => {
                self.access(pc, &mut state, base, offset, bytes, Some(&Value::default()))?;
                if let Some(fetched) = fetched {
                    state.set(fetched, Value::default());
                }
            }
            Op::LoadPacket | Op::CallKernel => state.called(Value::default()),
            Op::CallHelper { id } => self.helper(pc, &mut state, id),
            Op::Jump { to } => next = Some(to),
            Op::Branch { to } => {
                let pc = self.target(pc, to)?;
                let returns = returns.clone();
                self.reach(Place { returns, pc }, state.clone());
            }
            Op::CallFunction { to } => {
                if returns.len() + 1 == FRAMES {
                    return Err(Fault::TooDeep { pc });
                }
                returns.push(pc + 1);
                state.enter();
                next = Some(to);
            }
            Op::Exit => {
                next = returns.pop().map(|pc| pc as i64);
                if next.is_some() {
                    state.leave();
                }
            }
        }
        if let Some(to) = next {
            let pc = self.target(pc, to)?;
            self.reach(Place { returns, pc }, state);
        }
        Ok(())
    }

    /// Loads, or stores `value`, through whatever `base` may point to.
    fn access(
        &mut self,
        pc: usize,
        state: &mut State,
        base: u8,
        offset: i16,
        bytes: u8,
        value: Option<&Value>,
    ) -> Result<Value, Fault> {
        let targets = state.register(base).moved(Some(i32::from(offset)));
        let certain = targets.pointers().count() == 1;
        let mut loaded = Value::default();
        for pointer in targets.pointers() {
            match (pointer.base, value) {
                (Base::Object(object), _) => {
                    let offset = pointer.offset.ok_or(Fault::Computed { pc, object })?;
                    let write = value.is_some();
                    let access = Use::Access {
                        object,
                        offset,
                        bytes,
                        write,
                    };
                    self.note(pc, access);
                    if let Some(object) = fields::leads_to(object, offset) {
                        loaded.join(&Value::at(Base::Object(object)));
                    }
                }
                (Base::Frame(depth), Some(value)) => {
                    state.store(depth, pointer.offset, bytes, value, certain);
                }
                (Base::Frame(depth), None) => loaded.join(&state.load(depth, pointer.offset, bytes)),
                (Base::Map(_), _) => {}
            }
        }
        Ok(loaded)
    }

    fn helper(&mut self, pc: usize, state: &mut State, id: i32) {
        let map_of = |register| {
            state
                .register(register)
                .pointers()
                .filter_map(|pointer| match pointer.base {
                    Base::Map(fd) => Some(fd),
                    _ => None,
                })
        };
        // The map is the first argument of some, and the second of others, after the context.
        let maps: Vec<i32> = map_of(1).chain(map_of(2)).collect();
        if maps.is_empty() {
            self.note(pc, Use::Helper { id, map: None });
        }
        for &fd in &maps {
            self.note(pc, Use::Helper { id, map: Some(fd) });
        }
        let sockets = maps.iter().any(|fd| self.socket_maps.contains(fd));
        let result = helpers::returns(id, sockets).map(|object| Value::at(Base::Object(object)));
        state.called(result.unwrap_or_default());
    }

    /// Notes what is a matter of the program as a whole.
    fn shape(&mut self) {
        let reached: BTreeSet<usize> = self.known.keys().map(|place| place.pc).collect();
        let mut functions = false;
        let mut tail_call = None;
        for &pc in &reached {
            match decode(self.program, pc).map(|decoded| decoded.op) {
                Some(Op::Jump { to } | Op::Branch { to }) if to <= pc as i64 => {
                    self.note(pc, Use::Feature(Feature::Loop));
                }
                Some(Op::CallFunction { .. }) => functions = true,
                Some(Op::CallHelper {
                    id: helpers::TAIL_CALL,
                }) => tail_call = Some(pc),
                _ => {}
            }
        }
        if let Some(pc) = tail_call.filter(|_| functions) {
            self.note(pc, Use::Feature(Feature::TailCallAndFunctions));
        }
        if self.program.len() > SMALL {
            self.note(0, Use::Feature(Feature::Large));
        }
    }
}

#[cfg(test)]
mod tests;
