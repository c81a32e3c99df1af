// Package awscall detects that a failed request may have taken effect: after a lost reply the SDK retries it, and the retry fails
// the condition that the first attempt met.
package awscall

import (
	"context"
	"errors"
	"fmt"

	"github.com/aws/aws-sdk-go-v2/aws"

	"github.com/fencelab/fencelab/resource"
)

// Retryer returns r, but sets doubt when a failed attempt was not refused and may have taken effect.
func Retryer(r aws.Retryer, doubt *bool) aws.Retryer { return watched{r, doubt} }

type watched struct {
	aws.Retryer
	doubt *bool
}

func (w watched) IsErrorRetryable(err error) bool {
	if code := status(err); code < 400 || code >= 500 {
		*w.doubt = true
	}
	return w.Retryer.IsErrorRetryable(err)
}

// GetAttemptToken keeps r's rate limit, if it has one.
func (w watched) GetAttemptToken(ctx context.Context) (func(error) error, error) {
	if r, ok := w.Retryer.(aws.RetryerV2); ok {
		return r.GetAttemptToken(ctx)
	}
	return w.GetInitialToken(), nil
}

func status(err error) int {
	if r, ok := errors.AsType[interface {
		error
		HTTPStatusCode() int
	}](err); ok {
		return r.HTTPStatusCode()
	}
	return 0
}

// Outcome is the result of a store's Write. With doubt, a refusal as applied means that the first attempt took effect; any other
// refusal leaves that open, and must not be a *StaleTokenError.
func Outcome(store string, err error, doubt bool) error {
	stale, refused := errors.AsType[*resource.StaleTokenError](err)
	switch {
	case !refused || !doubt:
		return err
	case stale.Applied:
		return nil
	}
	return fmt.Errorf("%s: Write of %q at %v: a reply was lost, and a later fence has been accepted since; the write may have "+
		"taken effect before: seen %v", store, stale.Key, stale.Got, stale.Seen)
}
