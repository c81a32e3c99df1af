package consullock_test

import (
	"context"
	"io"
	"net/http"
	"testing"

	"github.com/fencelab/fencelab/dlock/internal/locktest"
	"github.com/fencelab/fencelab/internal/testmain"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

// server is nil if missing says why.
var (
	server  *testbed.Server
	missing error
)

func TestMain(m *testing.M) {
	testmain.Run(m, func(ctx context.Context) (io.Closer, error) {
		if server, missing = testbed.StartConsul(ctx, nil); missing != nil {
			return io.NopCloser(nil), nil //nolint:nilerr // tests in virtual time need none; the others ask for it
		}
		return server, nil
	})
}

func toServer(tb testing.TB) link {
	tb.Helper()
	testbed.Need(tb, missing)
	base := &http.Transport{}
	tb.Cleanup(base.CloseIdleConnections)
	return link{locktest.NewWire(), base, server.URL}
}
