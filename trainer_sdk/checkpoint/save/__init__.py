"""Saves: planned with all ranks, copied into a buffer, and handed to the writer.

The life of a save. The training runs the left side; the writer is a process of its own.

    Checkpointer.save
      SaveRequest ─▶ Preparation      all ranks: the same step? a plan? a buffer?
                         │ no: NotBegun (skipped or refused; all ranks alike)
                         ▼
                     PreparedSave     the plan, the flat state, the values as bytes, a buffer
                         ▼
                     SaveQueue.begin ─▶ Save, which a SaveHandle shows to the script
                         ▼
                     Stager           copies at once, or until the optimizer's next step
                         │ send_ahead, filled, send                   writer/service.py
                         └────────────── WriteState, BufferFilled ──▶ writes, hashes
        stage                                                             │
        copy     ◀── the Stager: ChangedError ─▶ fail                     │
        write    ◀── SaveProgress, NextWindow ────────────────────────────────┤
        hash     ◀── ImageKept: the image in memory is whole ─────────────┤
        publish  ◀── PartWritten: this rank's part is durable ────────────┤
        result   ◀── SaveDone: it is visible; SaveFailed: SaveError ──────┘
                         ▼
                     SaveQueue.maybe_finalize   calls `finalize`, in the order of saves

A save fails at a stage, or by time (`SaveQueue._look`); `on_error` decides whether it is sent
again. Each change of a save is made in SaveQueue, under one lock; `SaveEvents` reports it.
"""
