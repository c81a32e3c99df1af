package fill

import (
	"context"
	"errors"
	"time"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/redislock"
)

// Command returns the script that a Redis is filled with, and the command that runs it.
func Command(ctx context.Context, opts *redislock.Options, q dlock.Request) (script string, args []any, err error) {
	r, err := newRecorder(ctx, opts, q)
	if err != nil {
		return "", nil, err
	}
	args, err = r.record(ctx, q)
	return r.script, args, errors.Join(err, r.Close())
}

// ShowAt is Show at a moment of one's choice, since NewBar.
func (b *Bar) ShowAt(after time.Duration, done uint64, more string) error {
	return b.show(b.began.Add(after), done, more)
}

// OnTerminal makes b draw as on a terminal.
func (b *Bar) OnTerminal() { b.terminal = true }

// The readings of what servers say.
var (
	ParseInfo    = parseInfo
	ParseMetrics = parseMetrics
)
