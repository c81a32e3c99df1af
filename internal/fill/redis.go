package fill

import (
	"context"
	"errors"
	"fmt"
	"net"

	"github.com/redis/go-redis/v9"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/redislock"
)

// Pipeline says how requests share round trips. Zero values: 4 connections, 256 requests at a time.
type Pipeline struct {
	Conns int
	Batch int
}

// Redis takes the locks of s as a redislock.Backend with these options would, many in one round trip. A lock that another
// owner holds is counted, and left.
func Redis(ctx context.Context, client *redis.Client, opts *redislock.Options, s Set, p Pipeline, c *Counts) (err error) {
	if p.Conns == 0 {
		p.Conns = 4
	}
	if p.Batch == 0 {
		p.Batch = 256
	}
	switch most := client.Options().PoolSize; {
	case p.Conns < 1 || p.Batch < 1:
		return fmt.Errorf("fill: %d connections, batches of %d; want 1 at least", p.Conns, p.Batch)
	case p.Conns > most:
		return fmt.Errorf("fill: %d connections; the client's pool has %d", p.Conns, most)
	}
	r, err := newRecorder(ctx, opts, s.Request(0))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.Close()) }()
	if err := client.ScriptLoad(ctx, r.script).Err(); err != nil {
		return fmt.Errorf("fill: load the acquire script: %w", err)
	}
	return each(ctx, s.N, uint64(p.Batch), p.Conns, func(ctx context.Context, from, to uint64) error {
		pipe := client.Pipeline()
		cmds := make([]*redis.IntSliceCmd, 0, to-from)
		for i := from; i < to; i++ {
			args, err := r.record(ctx, s.Request(i))
			if err != nil {
				return err
			}
			cmd := redis.NewIntSliceCmd(ctx, args...)
			cmds = append(cmds, cmd)
			_ = pipe.Process(ctx, cmd) // queued; Exec tells
		}
		if _, err := pipe.Exec(ctx); err != nil {
			return fmt.Errorf("fill: locks %d to %d of %d: %w", from+1, to, s.N, err)
		}
		for _, cmd := range cmds {
			switch v := cmd.Val(); {
			case len(v) > 0 && v[0] > 0: // the token
				c.granted.Add(1)
			case len(v) == 2 && v[0] == 0:
				c.held.Add(1)
			default:
				return fmt.Errorf("fill: the acquire script returned %v", cmd.Val())
			}
		}
		return nil
	})
}

// recorder tells what a redislock.Backend would send: names and arguments stay the Backend's. Its client sends nothing.
type recorder struct {
	client  *redis.Client
	backend *redislock.Backend
	script  string
}

// newRecorder makes the recorder of a Backend with these options, and sees from a first request what its script is.
func newRecorder(ctx context.Context, opts *redislock.Options, first dlock.Request) (*recorder, error) {
	r := &recorder{client: redis.NewClient(&redis.Options{MaxRetries: -1})}
	r.client.AddHook(tape{})
	var err error
	if r.backend, err = redislock.New(r.client, opts); err != nil {
		return nil, errors.Join(err, r.client.Close())
	}
	c := &call{unknown: true}
	if _, err := r.backend.TryAcquire(context.WithValue(ctx, callKey{}, c), first); err != nil {
		return nil, errors.Join(err, r.Close())
	}
	r.script, _ = c.args[1].(string)
	return r, nil
}

// Close ends the Backend and the client.
func (r *recorder) Close() error { return errors.Join(r.backend.Close(), r.client.Close()) }

// record returns the command that TryAcquire sends for a request.
func (r *recorder) record(ctx context.Context, q dlock.Request) ([]any, error) {
	var c call
	_, err := r.backend.TryAcquire(context.WithValue(ctx, callKey{}, &c), q)
	return c.args, err
}

// call is what one request comes to.
type call struct {
	unknown bool // the server doesn't know the script, and is to be shown it
	args    []any
}

type callKey struct{}

// tape notes a client's commands and answers them itself: with a grant, whose token is 1.
type tape struct{}

var _ redis.Hook = tape{}

func (tape) DialHook(redis.DialHook) redis.DialHook {
	return func(context.Context, string, string) (net.Conn, error) { return nil, errTape }
}

func (tape) ProcessHook(redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		c, ok := ctx.Value(callKey{}).(*call)
		reply, is := cmd.(*redis.Cmd)
		if !ok || !is {
			cmd.SetErr(errTape)
			return errTape
		}
		if c.args = cmd.Args(); c.unknown && cmd.Name() == "evalsha" {
			reply.SetErr(noScriptError{errTape})
			return reply.Err()
		}
		reply.SetVal(granted)
		return nil
	}
}

func (tape) ProcessPipelineHook(redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(context.Context, []redis.Cmder) error { return errTape }
}

var (
	granted = []any{int64(1)}
	errTape = errors.New("fill: the lock asked for more than its acquire script")
)

// noScriptError is what a server says that doesn't know a script.
type noScriptError struct{ error }

func (noScriptError) Error() string { return "NOSCRIPT" }
func (noScriptError) RedisError()   {}
