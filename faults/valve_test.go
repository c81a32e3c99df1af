package faults

import (
	"runtime"
	"testing"

	"github.com/Shopify/toxiproxy/v2/stream"
	"github.com/Shopify/toxiproxy/v2/toxics"
	"github.com/stretchr/testify/require"
)

// From inside, for here the test is the socket: nothing leaves a valve after a hold was confirmed, and a delivery is
// confirmed only when the socket has asked for more than the last piece.
func TestValveConfirms(t *testing.T) {
	v := &valve{changed: make(chan struct{}), pipes: make(map[*pipe]struct{})}
	in, out := make(chan *stream.StreamChunk), make(chan *stream.StreamChunk)
	go v.Pipe(toxics.NewToxicStub(in, out))
	for round := range 1000 {
		in <- &stream.StreamChunk{Data: []byte{byte(round)}}
		deliver, err := v.inject(t.Context(), hold)
		require.NoError(t, err)
		for range 10 {
			runtime.Gosched()
			select {
			case piece := <-out:
				t.Fatalf("round %d: %v left a valve that holds", round, piece.Data)
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
