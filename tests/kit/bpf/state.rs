//! What registers and stack may hold at a place in a program: sets of pointers, which only grow.

use std::collections::{BTreeMap, BTreeSet};

use super::{fields::Object, insn::FRAME_POINTER};

/// Offsets from one base that are told apart; a loop over an array has more, and needs none of them.
const OFFSETS: usize = 8;
/// A spilled pointer fills one slot.
pub(super) const SLOT: i32 = 8;

/// Where a pointer points.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Base {
    Object(Object),
    /// The end of the frame at this depth of calls.
    Frame(usize),
    /// The map with this descriptor.
    Map(i32),
}

/// A pointer; without an offset, it may have any.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Pointer {
    pub(super) base: Base,
    pub(super) offset: Option<i32>,
}

/// What a register or a slot may hold. Whatever else it may hold is no pointer that is followed.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Value(BTreeSet<Pointer>);

impl Value {
    /// The start of something.
    pub(super) fn at(base: Base) -> Self {
        Self(BTreeSet::from([Pointer {
            base,
            offset: Some(0),
        }]))
    }

    pub(super) fn pointers(&self) -> impl Iterator<Item = Pointer> {
        self.0.iter().copied()
    }

    /// Adds what another path brings.
    pub(super) fn join(&mut self, other: &Self) {
        if self == other {
            return;
        }
        self.0.extend(&other.0);
        let bases: BTreeSet<Base> = self.0.iter().map(|pointer| pointer.base).collect();
        for base in bases {
            let of_base = || self.0.iter().filter(|pointer| pointer.base == base);
            if of_base().count() > OFFSETS || of_base().any(|pointer| pointer.offset.is_none()) {
                self.0.retain(|pointer| pointer.base != base);
                self.0.insert(Pointer { base, offset: None });
            }
        }
    }

    /// All of it moved by a constant, or by what is not known.
    pub(super) fn moved(&self, by: Option<i32>) -> Self {
        let mut moved = Self::default();
        for Pointer { base, offset } in &self.0 {
            let offset = offset.zip(by).and_then(|(offset, by)| offset.checked_add(by));
            moved.join(&Self(BTreeSet::from([Pointer { base: *base, offset }])));
        }
        moved
    }

    /// Without what points into a frame that is no more.
    fn without_frame(&self, depth: usize) -> Self {
        Self(
            self.0
                .iter()
                .copied()
                .filter(|pointer| pointer.base != Base::Frame(depth))
                .collect(),
        )
    }
}

/// Registers and stack of one function.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Frame {
    registers: [Value; 11],
    /// By the offset of the slot from the frame's end; what is not there holds no pointer.
    slots: BTreeMap<i32, Value>,
}

impl Frame {
    fn new(depth: usize) -> Self {
        let mut registers: [Value; 11] = Default::default();
        registers[usize::from(FRAME_POINTER)] = Value::at(Base::Frame(depth));
        Self {
            registers,
            slots: BTreeMap::new(),
        }
    }
}

/// The frames of all functions that have been entered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct State {
    frames: Vec<Frame>,
}

impl State {
    /// At the entry of a program: its context is in the first argument.
    pub(super) fn entry(context: Object) -> Self {
        let mut frame = Frame::new(0);
        frame.registers[1] = Value::at(Base::Object(context));
        Self { frames: vec![frame] }
    }

    /// Adds what another path to the same place brings; whether that is anything new.
    pub(super) fn join(&mut self, other: &Self) -> bool {
        let before = self.clone();
        for (frame, other) in self.frames.iter_mut().zip(&other.frames) {
            for (register, other) in frame.registers.iter_mut().zip(&other.registers) {
                register.join(other);
            }
            for (slot, other) in &other.slots {
                frame.slots.entry(*slot).or_default().join(other);
            }
        }
        *self != before
    }

    fn top(&mut self) -> &mut Frame {
        self.frames.last_mut().expect("the program's own frame stays")
    }

    pub(super) fn register(&self, number: u8) -> &Value {
        &self
            .frames
            .last()
            .expect("the program's own frame stays")
            .registers[usize::from(number)]
    }

    pub(super) fn set(&mut self, number: u8, value: Value) {
        self.top().registers[usize::from(number)] = value;
    }

    /// Enters a function: it sees the arguments, and nothing else of its caller but through them.
    pub(super) fn enter(&mut self) {
        let mut frame = Frame::new(self.frames.len());
        frame.registers[1..=5].clone_from_slice(&self.top().registers[1..=5]);
        self.frames.push(frame);
    }

    /// Comes back from a function with its result.
    pub(super) fn leave(&mut self) {
        let result = self.register(0).without_frame(self.frames.len() - 1);
        self.frames.pop();
        self.called(result);
    }

    /// After a call: its result, and the arguments are used up.
    pub(super) fn called(&mut self, result: Value) {
        self.set(0, result);
        (1..=5).for_each(|number| self.set(number, Value::default()));
    }

    /// What is in the stack at a pointer.
    pub(super) fn load(&self, depth: usize, offset: Option<i32>, bytes: u8) -> Value {
        let Some(frame) = self.frames.get(depth).filter(|_| i32::from(bytes) == SLOT) else {
            return Value::default();
        };
        match offset {
            Some(offset) => frame.slots.get(&offset).cloned().unwrap_or_default(),
            None => frame.slots.values().fold(Value::default(), |mut all, value| {
                all.join(value);
                all
            }),
        }
    }

    /// Writes to the stack. With `certain`, it is the only place that this can go to, and what was there is gone.
    pub(super) fn store(
        &mut self,
        depth: usize,
        offset: Option<i32>,
        bytes: u8,
        value: &Value,
        certain: bool,
    ) {
        let Some(frame) = self.frames.get_mut(depth) else {
            return;
        };
        let Some(offset) = offset else {
            if i32::from(bytes) == SLOT {
                frame.slots.values_mut().for_each(|slot| slot.join(value));
                // Slots that hold nothing yet: it may be any of them.
                for slot in (-512..0).step_by(SLOT as usize) {
                    frame.slots.entry(slot).or_insert_with(|| value.clone());
                }
            }
            return;
        };
        if certain {
            // A pointer of which a part is overwritten is none any more.
            let end = offset + i32::from(bytes);
            frame
                .slots
                .retain(|slot, _| slot + SLOT <= offset || end <= *slot);
        }
        if i32::from(bytes) == SLOT && *value != Value::default() {
            frame.slots.entry(offset).or_default().join(value);
        }
    }
}
