package faults

import (
	"context"
	"net"
	"runtime"
	"testing"
	"testing/synctest"
	"time"

	"github.com/Shopify/toxiproxy/v2/stream"
	"github.com/Shopify/toxiproxy/v2/toxics"
	"github.com/stretchr/testify/require"
)

// runPipe returns a valve with one pipe, which ends when in is closed and out has been read to its end.
func runPipe() (v *valve, in chan<- *stream.StreamChunk, out <-chan *stream.StreamChunk) {
	v = &valve{changed: make(chan struct{}), pipes: make(map[*pipe]struct{})}
	from, to := make(chan *stream.StreamChunk), make(chan *stream.StreamChunk)
	go v.Pipe(toxics.NewToxicStub(from, to))
	return v, from, to
}

// From inside, for here the test is the socket: nothing leaves a valve after a hold, or a long delay, was confirmed, and
// a delivery is confirmed only when the socket has asked for more than the last piece.
func TestValveConfirms(t *testing.T) {
	t.Run("Hold", func(t *testing.T) { testValveConfirms(t, hold, 0) })
	t.Run("Delay", func(t *testing.T) { testValveConfirms(t, delay, time.Hour) })
}

func testValveConfirms(t *testing.T, f flow, by time.Duration) {
	t.Helper()
	v, in, out := runPipe()
	for round := range 1000 {
		in <- &stream.StreamChunk{Data: []byte{byte(round)}, Timestamp: time.Now()}
		deliver, err := inject(t.Context(), "test", strike{new(Link), v, f, by})
		require.NoError(t, err)
		for range 10 {
			runtime.Gosched()
			select {
			case piece := <-out:
				t.Fatalf("round %d: %v left a valve that keeps it", round, piece.Data)
			default:
			}
		}
		delivered := make(chan error)
		go func() { delivered <- deliver(t.Context()) }()
		require.Equal(t, []byte{byte(round)}, (<-out).Data)
		select {
		case err := <-delivered:
			t.Fatalf("round %d: delivered (%v) before the last piece was written", round, err)
		case piece := <-out:
			require.Empty(t, piece.Data)
			require.NotNil(t, piece.Data)
		}
		require.NoError(t, <-delivered)
	}
	close(in)
	require.Nil(t, <-out)
}

// From inside, for the proxy may have taken a piece and not written it when a fault comes: the fault is in force only when
// the piece is written, and what came after it is under the fault.
func TestValveAwaitsWriting(t *testing.T) {
	for name, f := range map[string]struct {
		flow flow
		by   time.Duration
		kept []string // what arrives after the heal
	}{"Hold": {hold, 0, []string{"b", "", "c"}}, "Delay": {delay, time.Hour, []string{"b", "", "c"}}, "Drop": {drop, 0, nil}} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				v, in, out := runPipe()
				send := func(s string) { in <- &stream.StreamChunk{Data: []byte(s), Timestamp: time.Now()} }
				send("a")
				require.Equal(t, "a", string((<-out).Data)) // which is not written until more is asked for
				send("b")
				var heal Heal
				var err error
				inForce := make(chan struct{})
				go func() {
					defer close(inForce)
					heal, err = inject(t.Context(), "test", strike{new(Link), v, f.flow, f.by})
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
				synctest.Wait()
				select {
				case piece := <-out:
					t.Fatalf("%q left a valve that keeps it", piece.Data)
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

// A socket that takes nothing: no fault can be in force, and none is left behind.
func TestValveStalled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		v, in, out := runPipe()
		send := func(s string) { in <- &stream.StreamChunk{Data: []byte(s), Timestamp: time.Now()} }
		send("a")
		require.Equal(t, "a", string((<-out).Data))
		start := time.Now()
		for i, f := range []flow{hold, drop, delay} {
			_, err := inject(t.Context(), "test", strike{new(Link), v, f, time.Hour})
			require.ErrorIs(t, err, errStalled)
			require.Equal(t, time.Duration(i+1)*stallTimeout, time.Since(start))
		}
		send("b")
		require.Equal(t, "b", string((<-out).Data), "no fault is left")
		go send("c")
		require.Equal(t, "c", string((<-out).Data))
		close(in)
		require.Nil(t, <-out)
	})
}

// A pipe whose connection has died with a piece that nobody takes keeps no fault from coming into force.
func TestValveDead(t *testing.T) {
	for _, f := range []flow{hold, drop, delay} {
		synctest.Test(t, func(t *testing.T) {
			v, in, out := runPipe()
			for _, s := range []string{"a", "b"} {
				in <- &stream.StreamChunk{Data: []byte(s), Timestamp: time.Now()}
				if s == "a" {
					require.Equal(t, "a", string((<-out).Data)) // and its writing fails
				}
			}
			close(in)
			start := time.Now()
			heal, err := inject(t.Context(), "test", strike{new(Link), v, f, time.Hour})
			require.NoError(t, err)
			require.Equal(t, deadTimeout, time.Since(start))
			require.NoError(t, heal(t.Context()))
			require.NoError(t, v.drained(t.Context()))
		})
	}
}

// In virtual time, where a delay is exact: a piece leaves when the delay has passed since it came, no matter how many
// are under way, and so does the stream's end.
func TestValveDelays(t *testing.T) {
	const d = 10 * time.Second
	type arrival struct {
		after time.Duration
		what  string
	}
	play := func(t *testing.T, healAfter time.Duration) (got []arrival) {
		start := time.Now()
		v, in, out := runPipe()
		send := func(s string) { in <- &stream.StreamChunk{Data: []byte(s), Timestamp: time.Now()} }
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
		heal, err := inject(t.Context(), "delay", strike{new(Link), v, delay, d})
		require.NoError(t, err)
		_, err = inject(t.Context(), "hold", strike{new(Link), v, hold, 0})
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
		}, play(t, time.Minute))
	})
	synctest.Test(t, func(t *testing.T) {
		healed := d + time.Second/2
		require.Equal(t, []arrival{
			{0, "before"}, {d, "a"}, {d, "b"}, {healed, "c"}, {healed, "after"}, {healed, "end"},
		}, play(t, healed))
	})
	synctest.Test(t, func(t *testing.T) {
		v, in, out := runPipe()
		_, err := inject(t.Context(), "delay", strike{new(Link), v, delay, d})
		require.NoError(t, err)
		start := time.Now()
		in <- &stream.StreamChunk{Data: []byte("a"), Timestamp: time.Now()}
		time.Sleep(time.Second)
		close(in)
		require.NotNil(t, <-out)
		require.Equal(t, d, time.Since(start))
		require.Nil(t, <-out)
		require.Equal(t, d+time.Second, time.Since(start), "the end of the stream")
	})
}

// Strikes are one fault. If one of them can't be, no pipe feels any of them, and if one can't be healed, all others are.
func TestInjectAllOrNone(t *testing.T) {
	var strikes []strike
	for range 3 {
		v, in, _ := runPipe()
		defer close(in)
		strikes = append(strikes, strike{new(Link), v, drop, 0})
	}
	want := func(f flow) {
		t.Helper()
		for _, s := range strikes {
			s.valve.mu.Lock()
			require.Equal(t, f, s.valve.flow)
			s.valve.mu.Unlock()
		}
	}
	epochs := func() (n int) {
		for _, s := range strikes {
			n += s.valve.epoch
		}
		return n
	}
	for i := range strikes {
		number, err := strikes[i].valve.claim()
		require.NoError(t, err)
		before := epochs()
		_, err = inject(t.Context(), "test", strikes...)
		require.ErrorIs(t, err, errFaulty)
		require.Equal(t, before, epochs(), "changes of flow")
		strikes[i].valve.end(number)
	}
	heal, err := inject(t.Context(), "test", strikes...)
	require.NoError(t, err)
	want(drop)
	require.NoError(t, heal(t.Context()))
	want(pass)

	// The context ends while the second valve is being set: its pipe is busy for ever.
	ctx, cancel := context.WithCancel(t.Context())
	busy := strikes[1].valve
	stuck := &pipe{}
	busy.pipes[stuck] = struct{}{}
	go func() {
		_ = busy.wait(t.Context(), func() (bool, error) { return busy.flow == drop, nil })
		cancel()
	}()
	_, err = inject(ctx, "test", strikes...)
	require.ErrorIs(t, err, context.Canceled)
	want(pass)
	busy.leave(stuck)
	heal, err = inject(t.Context(), "test", strikes...)
	require.NoError(t, err)

	busy.shut()
	require.ErrorIs(t, heal(t.Context()), net.ErrClosed)
	require.Equal(t, pass, strikes[0].valve.flow)
	require.Equal(t, pass, strikes[2].valve.flow)
	_, err = inject(t.Context(), "test", strikes...)
	require.ErrorIs(t, err, net.ErrClosed)
	require.Equal(t, pass, strikes[0].valve.flow)
}
