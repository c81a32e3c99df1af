package redlock_test

import (
	"context"
	"errors"
	"io"
	"testing"

	"github.com/fencelab/fencelab/internal/testmain"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

var servers nodeSet

type nodeSet []*testbed.Server

func (n nodeSet) Close() error {
	var errs []error
	for _, s := range n {
		errs = append(errs, s.Close())
	}
	return errors.Join(errs...)
}

func TestMain(m *testing.M) {
	testmain.Run(m, func(ctx context.Context) (_ io.Closer, err error) {
		servers, err = testbed.StartRedisNodes(ctx, 5, &testbed.Options{AllowEmbedded: true})
		return servers, err
	})
}
