package faults

import (
	"context"
	"errors"
	"io"
	"net"
	"runtime"
	"testing"
	"testing/synctest"
	"time"

	toxiproxy "github.com/Shopify/toxiproxy/v2"
	"github.com/Shopify/toxiproxy/v2/stream"
	"github.com/Shopify/toxiproxy/v2/toxics"
	"github.com/rs/zerolog"
	"github.com/stretchr/testify/require"
)

// runPipe returns a direction with one pipe, and send, which sends a piece. The pipe ends when in is closed and out is drained.
func runPipe() (v *direction, send func(string), in chan<- *stream.StreamChunk, out <-chan *stream.StreamChunk) {
	v = &direction{changed: make(chan struct{}), pipes: make(map[*pipe]struct{})}
	send, in, out = v.run()
	return v, send, in, out
}

func (d *direction) run() (send func(string), in chan<- *stream.StreamChunk, out <-chan *stream.StreamChunk) {
	from, to := make(chan *stream.StreamChunk), make(chan *stream.StreamChunk)
	go d.Pipe(toxics.NewToxicStub(from, to))
	return func(s string) { from <- &stream.StreamChunk{Data: []byte(s), Timestamp: time.Now()} }, from, to
}

// A piece that the proxy has taken but not yet written must be written before the fault is in force.
func TestDirectionAwaitsWriting(t *testing.T) {
	for name, f := range map[string]struct {
		flow flow
		by   time.Duration
		kept []string
	}{"Hold": {hold, 0, []string{"b", "", "c"}}, "Delay": {delay, time.Hour, []string{"b", "", "c"}}, "Drop": {drop, 0, nil}} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				v, send, in, out := runPipe()
				send("a")
				require.Equal(t, "a", string((<-out).Data)) // but not written until the next read
				send("b")
				var heal Heal
				var err error
				inForce := make(chan struct{})
				go func() {
					defer close(inForce)
					heal, err = inject(t.Context(), "test", effect{v, f.flow, f.by})
				}()
				synctest.Wait()
				select {
				case <-inForce:
					t.Fatal("in force while a piece is being written")
				default:
				}
				piece := <-out
				require.Equal(t, []byte{}, piece.Data, "a piece that should be under the fault")
				<-inForce
				require.NoError(t, err)
				if f.flow == hold {
					require.NoError(t, v.held(t.Context()))
				}
				synctest.Wait()
				select {
				case piece := <-out:
					t.Fatalf("%q left a direction that keeps it", piece.Data)
				default:
				}
				healed := make(chan error, 1)
				go func() {
					healed <- heal(t.Context())
					if f.kept != nil {
						send("c")
					}
					close(in)
				}()
				var got []string
				for piece := range out {
					got = append(got, string(piece.Data))
				}
				require.NoError(t, <-healed)
				require.Equal(t, f.kept, got)
			})
		})
	}
}

func TestHoldOfTwo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		v, send, in, out := runPipe()
		sendOther, inOther, outOther := v.run()
		send("a")
		sendOther("a")
		<-out // not written until the next read
		<-outOther
		send("held")
		inForce := make(chan error, 1)
		go func() {
			_, err := inject(t.Context(), "test", effect{v, hold, 0})
			inForce <- err
		}()
		for _, out := range []<-chan *stream.StreamChunk{out, outOther} {
			synctest.Wait()
			require.Empty(t, (<-out).Data)
		}
		require.NoError(t, <-inForce)
		require.NoError(t, v.held(t.Context()))
		close(in)
		close(inOther)
		v.shut()
	})
}

func TestDirectionStalled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		v, send, in, out := runPipe()
		send("a")
		require.Equal(t, "a", string((<-out).Data))
		start := time.Now()
		for i, f := range []flow{hold, drop, delay} {
			_, err := inject(t.Context(), "test", effect{v, f, time.Hour})
			require.ErrorIs(t, err, errStalled)
			require.Equal(t, time.Duration(i+1)*stallTimeout, time.Since(start))
		}
		send("b")
		require.Equal(t, "b", string((<-out).Data), "no fault is left")
		taken := false
		go func() { send("c"); send("d"); taken = true }()
		synctest.Wait()
		require.False(t, taken, "a sender feels a slow destination")
		require.Equal(t, "cd", string((<-out).Data)+string((<-out).Data))
		close(in)
		require.Nil(t, <-out)
	})
}

func TestDirectionDead(t *testing.T) {
	for _, f := range []flow{hold, drop, delay} {
		synctest.Test(t, func(t *testing.T) {
			v, send, in, out := runPipe()
			send("a")
			require.Equal(t, "a", string((<-out).Data)) // the write fails
			send("b")
			close(in)
			start := time.Now()
			heal, err := inject(t.Context(), "test", effect{v, f, time.Hour})
			require.NoError(t, err)
			require.Equal(t, deadTimeout, time.Since(start))
			require.NoError(t, heal(t.Context()))
			require.NoError(t, v.drained(t.Context()))
		})
	}
}

func TestDirectionDelays(t *testing.T) {
	const d = 10 * time.Second
	type arrival struct {
		after time.Duration
		what  string
	}
	exchange := func(t *testing.T, healAfter time.Duration) (got []arrival) {
		start := time.Now()
		v, send, in, out := runPipe()
		done := make(chan struct{})
		go func() {
			defer close(done)
			for {
				switch piece := <-out; {
				case piece == nil:
					got = append(got, arrival{time.Since(start), "end"})
					return
				case len(piece.Data) > 0:
					got = append(got, arrival{time.Since(start), string(piece.Data)})
				}
			}
		}()
		send("before")
		synctest.Wait()
		heal, err := inject(t.Context(), "delay", effect{v, delay, d})
		require.NoError(t, err)
		_, err = inject(t.Context(), "hold", effect{v, hold, 0})
		require.ErrorIs(t, err, errFaulty)
		send("a")
		send("b")
		time.Sleep(time.Second)
		send("c")
		time.Sleep(healAfter - time.Second)
		require.NoError(t, heal(t.Context()))
		require.Equal(t, healAfter, time.Since(start), "a heal that waits")
		send("after")
		close(in)
		<-done
		return got
	}
	synctest.Test(t, func(t *testing.T) {
		require.Equal(t, []arrival{
			{0, "before"}, {d, "a"}, {d, "b"}, {d + time.Second, "c"}, {time.Minute, "after"}, {time.Minute, "end"},
		}, exchange(t, time.Minute))
	})
	synctest.Test(t, func(t *testing.T) {
		healed := d + time.Second/2
		require.Equal(t, []arrival{
			{0, "before"}, {d, "a"}, {d, "b"}, {healed, "c"}, {healed, "after"}, {healed, "end"},
		}, exchange(t, healed))
	})
	synctest.Test(t, func(t *testing.T) {
		v, send, in, out := runPipe()
		_, err := inject(t.Context(), "delay", effect{v, delay, d})
		require.NoError(t, err)
		start := time.Now()
		send("a")
		time.Sleep(time.Second)
		close(in)
		require.NotNil(t, <-out)
		require.Equal(t, d, time.Since(start))
		require.Nil(t, <-out)
		require.Equal(t, d+time.Second, time.Since(start), "the end of the stream")
	})
}

func TestInjectAllOrNone(t *testing.T) {
	var effects []effect
	for range 3 {
		v, _, in, _ := runPipe()
		defer close(in)
		effects = append(effects, effect{v, drop, 0})
	}
	want := func(f flow) {
		t.Helper()
		for _, s := range effects {
			s.dir.mu.Lock()
			require.Equal(t, f, s.dir.flow)
			s.dir.mu.Unlock()
		}
	}
	epochs := func() (n int) {
		for _, s := range effects {
			n += s.dir.epoch
		}
		return n
	}
	for i := range effects {
		require.NoError(t, effects[i].dir.claim())
		before := epochs()
		_, err := inject(t.Context(), "test", effects...)
		require.ErrorIs(t, err, errFaulty)
		require.Equal(t, before, epochs(), "changes of flow")
		effects[i].dir.release()
	}
	heal, err := inject(t.Context(), "test", effects...)
	require.NoError(t, err)
	want(drop)
	require.NoError(t, heal(t.Context()))
	want(pass)

	// The context ends while the second direction, whose pipe never reacts, is being set.
	ctx, cancel := context.WithCancel(t.Context())
	busy := effects[1].dir
	stuck := &pipe{}
	busy.pipes[stuck] = struct{}{}
	go func() {
		_ = busy.wait(t.Context(), func() (bool, error) { return busy.flow == drop, nil })
		cancel()
	}()
	_, err = inject(ctx, "test", effects...)
	require.ErrorIs(t, err, context.Canceled)
	want(pass)
	busy.leave(stuck)
	heal, err = inject(t.Context(), "test", effects...)
	require.NoError(t, err)

	busy.shut()
	require.ErrorIs(t, heal(t.Context()), net.ErrClosed)
	require.Equal(t, []flow{pass, shut, pass}, []flow{effects[0].dir.flow, busy.flow, effects[2].dir.flow})
	before := epochs()
	_, err = inject(t.Context(), "test", effects...)
	require.ErrorIs(t, err, net.ErrClosed)
	require.Equal(t, before, epochs(), "changes of flow")
}

// The direction stays closed when the message arrives from which it was to drop everything.
func TestLoseFromClosed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		v, send, in, _ := runPipe()
		v.loseFrom(1, v)
		v.shut()
		send("a")
		synctest.Wait()
		require.Equal(t, shut, v.flow)
		close(in)
	})
}

func TestRefuseAwaitsConnections(t *testing.T) {
	for _, way := range []stream.Direction{stream.Upstream, stream.Downstream} {
		link, err := NewLink("127.0.0.1:1")
		require.NoError(t, err)
		source, _ := io.Pipe()
		_, dest := io.Pipe()
		server := toxiproxy.NewServer(toxiproxy.NewMetricsContainer(nil), zerolog.Nop())
		link.proxy.Toxics.StartLink(server, "unlisted", source, dest, way)
		for joined := 0; joined == 0; runtime.Gosched() {
			for _, e := range link.both(pass, 0) {
				e.dir.mu.Lock()
				joined += len(e.dir.pipes)
				e.dir.mu.Unlock()
			}
		}
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		_, err = link.Refuse(ctx)
		require.ErrorIs(t, err, context.DeadlineExceeded, "a connection is open")
		require.NoError(t, source.Close())
		ctx, cancel = context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		_, err = link.Refuse(ctx)
		require.NoError(t, err)
		require.NoError(t, link.Close())
	}
}

func TestRefuseUndoFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		link, err := NewMemoryLink("mine", nil)
		require.NoError(t, err)
		ctx, cancel := context.WithCancelCause(t.Context())
		late, taken := errors.New("late"), errors.New("taken")
		link.start = func() error { return taken }
		link.stop = func() {
			cancel(late)
			time.Sleep(undoTimeout / 2)
		}
		_, err = link.Refuse(ctx)
		require.ErrorIs(t, err, late)
		require.ErrorIs(t, err, taken)
		require.NoError(t, link.Close())
	})
}

func TestCloseAwaitsConnections(t *testing.T) {
	for _, way := range []stream.Direction{stream.Upstream, stream.Downstream} {
		synctest.Test(t, func(t *testing.T) {
			link, err := NewMemoryLink("mine", nil)
			require.NoError(t, err)
			source, _ := io.Pipe()
			_, dest := io.Pipe()
			link.proxy.Toxics.StartLink(link.server, "unlisted", source, dest, way)
			synctest.Wait()
			closed := make(chan error, 1)
			go func() { closed <- link.Close() }()
			synctest.Wait()
			require.Empty(t, closed, "a connection is open")
			require.NoError(t, source.Close())
			require.NoError(t, <-closed)
		})
	}
}

func TestMemoryLinkForgetsConnections(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var server net.Conn
		link, err := NewMemoryLink("mine", func() (ours net.Conn, _ error) {
			ours, server = net.Pipe()
			return ours, nil
		})
		require.NoError(t, err)
		client, err := link.Dial(t.Context())
		require.NoError(t, err)
		require.Len(t, link.memory.ends, 2)
		require.NoError(t, client.Close())
		_, err = server.Read(make([]byte, 1))
		require.ErrorIs(t, err, io.EOF)
		synctest.Wait()
		require.Empty(t, link.memory.ends)
		require.NoError(t, link.Close())
	})
}
